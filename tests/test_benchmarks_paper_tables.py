"""Our lines beside published ones, what they are called, and what is said of figures that are missing or highest."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

import pytest
from made_results import made, table_of

from benchmarks.results.profiles import PAPER


def test_every_other_row_says_what_our_procap_is_ahead_by(tmp_path):
    done = made(tmp_path, "base-to-novel", PAPER, datasets=("dtd", "eurosat"), methods=("maple", "procap"), seeds=(1,))
    table = table_of(done, "base-to-novel")
    assert [column.title for column in table.columns] == ["Base", "Novel", "HM", "Δ vs ProCAP"]
    hm = {row.labels: row.cells[2].mean for row in table.rows}
    seen = 0
    for row in table.rows:
        if row.average or row.labels[1] == "ProCAP, reproduced":
            assert row.cells[3] is None, "of this average nothing is published"
        else:
            seen += 1
            own = hm[row.labels[0], "ProCAP, reproduced"]
            assert row.cells[3].mean == pytest.approx(own - hm[row.labels], abs=1e-9)
    assert seen == 2 * (17 + 1)
    alone = made(tmp_path / "alone", "base-to-novel", PAPER, datasets=("dtd",), methods=("maple",), seeds=(1,))
    assert [column.title for column in table_of(alone, "base-to-novel").columns] == ["Base", "Novel", "HM"]


def test_a_method_in_procaps_recipe_is_called_so_and_not_ranked_among_published_ones(tmp_path):
    chosen: dict[str, Any] = {"datasets": ("dtd",), "methods": ("maple", "procap"), "seeds": (1,), "recipe": "procap"}
    done = made(tmp_path, "base-to-novel", PAPER, **chosen)
    table = table_of(done, "base-to-novel")
    groups = [{row.group for row in table.rows if row.source == source} for source in ("ours", "published")]
    assert not groups[0] & groups[1] and len(groups[0]) == 1, "all of ours have one recipe"
    lines = {row.labels[1]: row for row in table.rows if row.source == "ours"}
    assert set(lines) == {"MaPLe (ProCAP's recipe)", "ProCAP, reproduced"}
    assert [row.cells[0].published is None for row in lines.values()] == [True, False]
    speed = table_of(done, "base-to-novel-speed")
    assert any("MaPLe (ProCAP's recipe)" in row.labels for row in speed.rows)
    assert not speed.marks(), "runs side by side, or on several machines, are no race"
    generated = made(tmp_path / "mini", "base-to-novel", **{**chosen, "datasets": ("shapes",)})
    names = {row.labels[1] for row in table_of(generated, "base-to-novel").rows}
    assert names == {"MaPLe", "ProCAP"}, "there it is everybody's recipe"


def test_a_missing_result_names_the_command_that_makes_it(tmp_path):
    def skip(entry: Any, target: str) -> bool:
        return entry.dataset == "tiles"

    done = made(tmp_path, "stability", datasets=("shapes", "tiles"), seeds=(1, 2), quick=True, skip=skip)
    [note] = [note for note in table_of(done, "stability").notes if note.startswith("MISSING")]
    words = shlex.split(note.split("`")[1])
    assert words[:3] == ["procap", "bench", "stability"] and "--quick" in words
    said = dict(pairwise(words))
    assert said["--results"] == str(tmp_path) and said["--profile"] == "mini"
    assert said["--datasets"] == "shapes,tiles" and said["--seeds"] == "1,2"
