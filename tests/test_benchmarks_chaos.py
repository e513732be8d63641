"""The campaign of random faults: what it damages, what it takes for a clear end, and one seed of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from made_results import put_halves

from benchmarks.studies.chaos.__main__ import describe_unclear_end, main
from benchmarks.studies.chaos.damage import damage_files, list_files
from runner.run_folders import find_runs


def test_damage_is_random_and_is_undone_as_a_user_would(few_digits: Path, tmp_path: Path) -> None:
    results, data = tmp_path / "results", tmp_path / "data"
    (data / "digits").mkdir(parents=True)
    (data / "digits" / "manifest.json").write_text("{}")
    kinds: set[str] = set()
    for seed in range(30):
        put_halves(results, "coop", "digits", (3, 4), (1, 2))
        put_halves(results, "maple", "digits", (3, 4), (1, 2))
        before = list_files(tmp_path)
        damage = damage_files(random.Random(seed), results, data)
        kinds |= {one.kind for one in damage}
        for one in reversed(damage):
            one.undo()
        after = list_files(tmp_path)
        assert all(before[path] == content for path, content in after.items()), (seed, [*map(str, damage)])
        assert (damage == []) <= (before == after) and len(find_runs(results)) >= 2 - len(damage)
    assert kinds == {"truncate", "flip", "remove", "duplicate"}


@pytest.mark.parametrize(
    ("code", "err", "is_clear"),
    [
        (0, "", True),
        (1, "procap: error: no data\n", True),
        (3, "procap: 1 done, 1 failed:\n", True),
        (143, "procap: stopped\n", True),
        (-9, "", True),
        (1, "", False),
        (1, "procap: error: one\nprocap: error: two\n", False),
        (0, "Traceback (most recent call last):\n", False),
        (1, "procap: internal error: KeyError\n", False),
        (-11, "", False),
    ],
)
def test_an_end_is_clear_or_not(code: int, err: str, is_clear: bool) -> None:
    assert (describe_unclear_end(code, err) == []) == is_clear


@pytest.mark.slow
def test_a_seed_ends_as_an_undisturbed_run_and_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    [seed] = json.loads((tmp_path / "chaos.json").read_text())["seeds"]
    assert seed["faults"] and len(seed["ends"]) > 1 and seed["ends"][-1].startswith("0:") and seed["wrong"] == []
    first = capsys.readouterr().out
    assert main(["--seeds", "1", "--out", str(tmp_path)]) == 0 and capsys.readouterr().out == first
