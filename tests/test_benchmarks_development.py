"""Runs on a half of the base half, by the command line: what they are tested on and what they cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cli import main
from shards.catalogue import find
from shards.fewshot import CLASS_CHOICES, select_labels


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict:
    capsys.readouterr()
    place = ("--data", str(folder / "data"), "--results", str(folder), "--dry-run", "--json")
    # The plan is printed before the run is refused, which is not trained.
    assert main(["eval", "--methods", "coop", "--epochs", "2", *flags, *place]) == 1
    [run] = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    return run


def test_a_development_run_is_evaluated_on_val_and_never_on_test(capsys, tmp_path):
    run = planned(capsys, tmp_path, "--datasets", "digits", "--classes", "dev-base")
    assert run["run"].startswith("dev-base/digits/coop/")
    assert [target["target"] for target in run["targets"]] == ["digits:dev-base:val", "digits:dev-novel:val"]
    # Three and two of ten classes, 16 shots, two epochs.
    val = find("digits").counts["val"]
    assert run["train_images"] == 2 * 3 * 16
    assert [target["images"] for target in run["targets"]] == [round(val * 3 / 10), round(val * 2 / 10)]


def test_where_no_val_list_is_published_training_images_stand_in(capsys, tmp_path):
    run = planned(capsys, tmp_path, "--datasets", "imagenet", "--classes", "dev-base")
    assert [target["target"] for target in run["targets"]] == ["imagenet:dev-base:train", "imagenet:dev-novel:train"]


@pytest.mark.parametrize("classes", CLASS_CHOICES)
def test_plans_count_the_classes_that_runs_take(capsys, tmp_path, classes):
    for name in ("oxford-pets", "dtd"):
        run = planned(capsys, tmp_path, "--datasets", name, "--classes", classes, "--shots", "1")
        assert run["train_images"] == 2 * len(select_labels(range(find(name).classes), classes))
