"""What exists: listings of `procap ls`, states of runs in every list, and completion in the shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from made_results import put_halves, put_run

from procap.weights.loading import load_clip
from runner.results import Progress, write_json
from runner.run_folders import RunFolder

pytestmark = pytest.mark.usefixtures("at_home")


@pytest.mark.parametrize("what", ["methods", "datasets", "backbones", "suites", "runs"])
def test_listings_are_readable_and_json(capsys, what):
    put_run(Path("results"), "coop", "digits")
    code, out, _ = run(capsys, "ls", what, "--json")
    rows, (_, text, _) = json.loads(out), run(capsys, "ls", what)
    lines = text.splitlines()
    table = [line for line in lines if not line.startswith("    ")]
    assert what == "runs" or max(map(len, lines)) <= 120
    assert code == 0 and len(table) == len(rows) + 2
    assert all(str(row.get("name", row.get("run"))) in line for row, line in zip(rows, table[2:], strict=True))


def test_the_listing_of_a_method_has_its_options_and_what_its_recipe_sets(capsys):
    code, out, _ = run(capsys, "ls", "methods", "CoOp", "LP++")
    coop, lppp = out.split("\n\n")
    assert code == 0 and coop.startswith("coop: CoOp") and "lr=0.002" in coop
    assert "  n_ctx=4                learned context tokens" in coop
    assert lppp.startswith("lppp:") and "steps=300" in lppp and "lr=" not in lppp
    assert "ls suites takes no name: 'all'" in run(capsys, "ls", "suites", "all")[2]


def complete(words: str, incomplete: str) -> list[str]:
    """The answer of `procap --show-completion bash` to a tab after `words`."""
    environment = {"_PROCAP_COMPLETE": "complete_bash", "COMP_WORDS": f"procap {words} {incomplete}"}
    environment["COMP_CWORD"] = str(len(words.split()) + 1)
    program = [sys.executable, "-c", "from benchmarks.cli import main; main()"]
    done = subprocess.run(program, env=os.environ | environment, capture_output=True, text=True)
    return done.stdout.split()


def test_the_shell_completes_methods_data_sets_and_runs():
    put_run(Path("results"), "coop", "digits")
    assert complete("train --methods", "coop,prog") == ["coop,prograd"]
    assert complete("eval --datasets", "dig") == ["digits"]
    assert complete("eval", "results/base/d")[0].startswith("results/base/digits/coop/mini/16shot/seed1-")


def test_words_are_those_that_mini_knows(capsys):
    words = [row["word"] for row in json.loads(run(capsys, "ls", "words", "--json")[1].splitlines()[-1])]
    assert {"red", "hexagon"} <= {*words} and not load_clip("mini").unknown_names(words)


def test_runs_are_listed_with_what_they_are_and_selected(capsys):
    results = Path("results")
    best = put_halves(results, "coop", "digits", (60, 100), (60, 100), shots=4)
    put_halves(results, "coop", "digits", (90, 100), (10, 100), shots=16)
    put_run(results, "maple", "tiles", seed=2, shots=0)
    broken = put_run(results, "maple", "digits", shots=1)
    (results / broken.path / "train.json").write_text("{}")

    def listed(*words: str) -> list[tuple[str, int, str, float | None]]:
        code, out, _ = run(capsys, "ls", "runs", *words, "--json")
        rows = json.loads(out.splitlines()[-1])
        assert code == any(row["state"] == "broken" for row in rows)
        assert all((row["date"] or "20")[:2] == "20" for row in rows)
        return [(row["method"], row["shots"], row["state"], row["accuracy"]) for row in rows]

    coop = [("coop", 4, "finished", 60.0), ("coop", 16, "finished", pytest.approx(18.0))]
    assert sorted(listed("--methods", "coop")) == sorted(coop)
    assert listed("--methods", "maple") == [("maple", 1, "broken", None), ("maple", 0, "finished", None)]
    selecting = ("--methods", "table1", "--datasets", "all", "--classes", "base", "--precision", "fp32")
    assert listed(*selecting) == listed()
    put_run(results, "vpt", "tiles", backbone="ViT-B-16")
    assert (
        listed("--backbone", "ViT-B-16", "--pretrained", "openai")[0][0]
        == "vpt"
        == listed("--backbone", "ViT-B/16")[0][0]
    )
    assert (
        listed("--methods", "vpt", "--pretrained", "laion2b_s34b_b88k")
        == []
        == listed("--methods", "vpt", "--backbone", "mini")
    )
    _, out, err = run(capsys, "ls", "runs", "--datasets", "digits", "--methods", "coop", "--shots", "4")
    *cells, path = out.splitlines()[-1].split()
    assert " ".join(cells[3:]) == "coop digits 60.00 60.00 60.00" and path == best.path
    assert "harmonic mean of base and novel" in err
    for lr in (0.5, 0.7):
        put_halves(results, "coop", "digits", (70, 100), (60, 100), shots=4, overrides={"lr": lr})
    put_halves(results, "zeroshot", "digits", (70, 100), (60, 100))
    _, out, _ = run(capsys, "ls", "runs", "--methods", "coop,zeroshot", "--shots", "4")
    assert "zeroshot  digits   64.62" in out and "\n    lr 0.5" in out and max(map(len, out.splitlines())) <= 120
    long = put_run(results, "caspl-promptsrc", "oxford-flowers", backbone="ViT-B-16", overrides={"lr": 0.25})
    put_run(results, "caspl-promptsrc", "oxford-flowers", backbone="ViT-B-16", options={"n_ctx": 2})
    _, out, _ = run(capsys, "ls", "runs", "--backbone", "ViT-B-16")
    assert long.path in out and max(map(len, out.splitlines())) <= 120
    wrong = {"runs --classes bse": "did you mean base", "runs --precision fp31": "did you mean fp32"}
    for words, message in (wrong | {"methods --seeds 1": "ls runs --seeds 1"}).items():
        code, _, err = run(capsys, "ls", *words.split())
        assert code == 2 and message in err


@pytest.fixture
def listed_states(capsys, few_digits):
    """Read the state of the only run from `ls runs` and `--dry-run`, and whether a dry run counts any target."""
    words = ["--methods", "coop", "--datasets", "digits", "--epochs", "2", "--data", few_digits, "--dry-run", "--json"]

    def read(listing: int = 0) -> tuple[str, str, bool]:
        code, out, _ = run(capsys, "ls", "runs", "--json")
        [row] = json.loads(out.splitlines()[-1])
        assert code == listing
        [planned] = json.loads(run(capsys, "eval", *words)[1].splitlines()[-1])["runs"]
        return row["state"], planned["state"], any(planned["targets"].values())

    return read


def test_a_failed_run_is_called_so_in_every_list(listed_states):
    folder = RunFolder("results" / Path(put_run(Path("results"), "coop", "digits", overrides={"epochs": 2}).path))
    folder.train_file.unlink()
    progress = Progress(
        config_hash=folder.path.name[-8:], status="failed", step=1, steps=9, epochs=[], seconds=1, environment={}
    )
    write_json(folder.progress_file, progress)
    assert listed_states() == ("failed", "failed", False)


def test_a_run_with_a_broken_file_is_called_so_in_every_list(listed_states):
    config = put_run(Path("results"), "coop", "digits", overrides={"epochs": 2})
    RunFolder("results" / Path(config.path)).train_file.write_text("{}")
    assert listed_states(listing=1) == ("broken", "broken", False)


def test_no_result_on_other_data_counts_as_finished_in_a_dry_run(listed_states):
    put_halves(Path("results"), "coop", "digits", (5, 10), (5, 10), overrides={"epochs": 2})
    assert listed_states()[1:] == ("other data", False)
