"""A few seeds of the campaign of kills: nothing is wrong with them, and what is wrong is found."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from benchmarks.studies.faults import campaign as faults
from benchmarks.studies.faults.checks import Watcher, compare, count_overdue, list_leftovers
from benchmarks.studies.faults.ranks import STAGES, Attempt, Signs
from runner.results import write_json
from shards.files import write_file


@pytest.fixture(scope="module")
def finished(few_digits, tmp_path_factory):
    """A run of one epoch without kills."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(faults, "EPOCHS", 1)
        run = faults.make_run("maple", few_digits, tmp_path_factory.mktemp("undisturbed"))
        faults.run_undisturbed(run)
        yield run


@pytest.mark.slow
def test_runs_of_three_seeds_end_as_without_kills(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(faults, "EPOCHS", 2)
    monkeypatch.setattr(faults, "METHODS", ("maple",))
    out = tmp_path / "faults.json"
    assert faults.main(["--seeds", "3", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert printed == out.with_suffix(".md").read_text() and "| **wrong** | **0** |" in re.sub(" +", " ", printed)
    assert [story["wrong"] for story in report["seeds"]] == [[]] * 3
    kills = [kill for story in report["seeds"] for kill in story["kills"]]
    assert len(kills) >= 3 and {kill["stage"] for kill in kills} <= set(STAGES)
    for story in report["seeds"]:
        assert story["sizes"][0] == 2 and len(story["sizes"]) > len(story["kills"]) and story["looks"] > 10
        assert story["difference"]["weights"] < 1e-3 and story["difference"]["counts"] == 0


def copied(run, folder):
    """The same run in another folder."""
    other = faults.make_run("maple", run.data, folder)
    shutil.copytree(run.results, folder)
    return other


def test_the_same_results_are_found_to_be_the_same(finished, tmp_path):
    wrong: list[str] = []
    found = compare(finished, copied(finished, tmp_path / "same"), wrong)
    assert (found.terms, found.weights, found.counts, wrong) == (0, 0, 0, [])


def test_every_kind_of_difference_is_found(finished, tmp_path):
    run = copied(finished, tmp_path / "other")
    folder = run.folder
    done, counted = folder.train(), folder.evaluation(run.targets[0])
    epochs = [done.epochs[0].model_copy(update={"terms": {"ce": 9.0}}), *done.epochs[1:]]
    picks = done.fewshot.model_copy(update={"picks": done.fewshot.picks[::-1]})
    write_json(folder.train_file, done.model_copy(update={"steps": 7, "epochs": epochs, "fewshot": picks}))
    right = [counted.per_class.correct[0] ^ 1, *counted.per_class.correct[1:]]
    per_class = counted.per_class.model_copy(update={"correct": right})
    changes = {"per_class": per_class, "correct": sum(right), "calibration": None, "correct_bits": None}
    write_json(folder.eval_file(run.targets[0]), counted.model_copy(update={**changes, "wrong_labels": None}))
    folder.state.mkdir()
    write_file(folder.state / "x", "")
    wrong: list[str] = []
    compare(finished, run, wrong)
    for part in ("steps: 7", "fewshot: ", "a loss term is off", "1 counts of right", "state/x was left over"):
        assert sum(part in line for line in wrong) == 1, wrong
    assert len(wrong) == 5


def test_a_file_that_cannot_be_read_or_a_lock_that_is_held_is_found(finished, tmp_path):
    run, wrong = copied(finished, tmp_path / "broken"), []
    watcher = Watcher(run, wrong)
    watcher.look()
    assert wrong == [] and list_leftovers(run) == []
    with run.folder.locked():
        assert list_leftovers(run) == [f"{run.folder.path} is still held"]
    run.folder.checkpoint_file.write_bytes(b"cut")
    run.folder.state.mkdir()
    watcher.look(at_once=True)
    watcher.look(at_once=True)
    assert len(wrong) == 1 and "checkpoint.safetensors" in wrong[0]


def test_steps_that_were_done_although_a_state_was_due_are_found(few_digits, tmp_path):
    run = faults.make_run("maple", few_digits, tmp_path)
    assert count_overdue(run, Signs([0], [0.0, time.time() + 9])) == 0
    run.folder.path.mkdir(parents=True)
    write_file(run.folder.progress_file, "")
    began = run.folder.progress_file.stat().st_mtime
    in_time, late = [began + 0.9 * run.every] * 4, [began + 1.1 * run.every] * 5
    assert count_overdue(run, Signs([0], [0.0, *in_time, *late[:3]])) == 0
    assert count_overdue(run, Signs([0], [0.0, *in_time, *late])) == 2


def test_a_rank_that_hangs_is_found_and_ended(finished, tmp_path):
    run = copied(finished, tmp_path / "hung")
    with Attempt(run, 2) as attempt:
        attempt.signal(1, 19)
        assert not attempt.wait(0.2, lambda: None)
        assert 1 in attempt.alive()
    assert attempt.alive() == []


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--processes", "3"], ["--seeds", "many"]])
def test_unusable_flags_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        faults.main(wrong)
    assert stop.value.code == 2 and "seeds" in capsys.readouterr().err
