"""Files of a run whose numbers or owner cannot be right are refused by name, in one line."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_results import put_run, put_score
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sessions import train
from small_runs import make_runtime

from benchmarks.cli import main
from procap.errors import UserError
from runner.checkpoint import read_checkpoint, save_checkpoint
from runner.config import RunConfig, RuntimeConfig
from runner.planning import plan_run
from runner.results import CheckpointCard, write_bytes
from runner.run_folders import RunFolder
from shards.manifest import lines_digest

EVAL, TRAIN, CHECKPOINT, CONFIG = "eval/shapes-base-test.json", "train.json", "checkpoint.safetensors", "config.json"


def put_whole_run(results, seed=1):
    config = put_run(results, "coop", "shapes", seed=seed)
    folder = RunFolder(results / config.path)
    card = CheckpointCard(
        config=config, classnames=("a",), template="{}", templates=("{}",),
        backbone_digest="b" * 16, manifest_digest="d" * 16,
    )  # fmt: skip
    sha256 = save_checkpoint(folder.checkpoint_file, torch.nn.Linear(2, 2), card)
    change(folder.train_file, checkpoint_sha256=sha256)
    for half in ("base", "novel"):
        put_score(results, config, f"shapes:{half}", 30, 40, checkpoint=sha256)
    return folder


def change(file, **fields):
    """Set fields of a JSON file; two underscores in a name separate the levels."""
    document = json.loads(file.read_text())
    for name, value in fields.items():
        *place, last = name.split("__")
        inner = document
        for part in place:
            inner = inner[int(part) if isinstance(inner, list) else part]
        inner[last] = value
    file.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    results = tmp_path_factory.mktemp("made")
    for seed in (1, 2):
        put_whole_run(results, seed)
    return results


@pytest.fixture
def runs(made, tmp_path) -> list[RunFolder]:
    shutil.copytree(made, tmp_path / "results")
    return [RunFolder(path.parent) for path in sorted(tmp_path.rglob(CONFIG))]


def pack(probabilities: list[float]) -> str:
    """As a result has them: the base64 of float32 values."""
    return base64.b64encode(struct.pack(f"<{len(probabilities)}f", *probabilities)).decode()


BINS = {"ece": 0.0, "count": [2] + 14 * [0], "confidence": [0.0] * 15, "correct": [1] + 14 * [0]}
CALIBRATION = {"nll": 1.0, "brier": 1.0, "equal_width": BINS}
SAMPLES = {"shots": 16, "seed": 1, "digest": lines_digest(["a.png"]), "samples": ["a.png"]}
FIELDS: dict[str, list[tuple[dict[str, Any], str]]] = {
    EVAL: [
        ({"correct": 41}, "41 of 40"),
        ({"correct": True}, "correct = True"),
        ({"total": 0, "correct": 0}, "total = 0"),
        ({"per_class__total": [41]}, "30 of 41"),
        ({"num_classes": 2}, "num_classes is 2"),
        ({"per_class": {"correct": [41, -11], "total": [20, 20]}, "num_classes": 2}, "correct.1 = -11"),
        ({"per_class": {"correct": [29, 1], "total": [20, 20]}, "num_classes": 2}, "29 of 20 images of class 0"),
        ({"per_class__names": ["a", "b"]}, "per_class has 1 classes"),
        ({"dataset_size": 39}, "total = 40 images, of dataset_size = 39"),
        ({"limit": 5}, "of dataset_size = 40 with limit = 5"),
        ({"limit": None, "dataset_size": 99}, "of dataset_size = 99 with limit = None"),
        ({"precision": "bf16"}, "was computed in bf16, its run in fp32"),
        ({"labels": [0], "predicted": [0]}, "labels has 1 images, total is 40"),
        ({"labels": [0] * 40}, "belong together"),
        ({"labels": [0] * 40, "predicted": [99] * 40}, "name class 99 of 1"),
        ({"labels": [0] * 40, "predicted": [0] * 40}, "labels and predicted contradict per_class"),
        ({"confidence": pack([0.5])}, "confidence has 1 images, total is 40"),
        ({"confidence": pack([0.5] * 39 + [1.5])}, "confidence.39 = 1.5"),
        ({"confidence": pack([float("nan")] * 40)}, "confidence.0 = nan"),
        ({"confidence": "AAA"}, "confidence = 'AAA': incorrect padding"),
        ({"confidence": pack([0.5] * 40), "base_confidence": pack([0.6] * 40)}, "base_confidence is higher"),
        ({"calibration": CALIBRATION}, "calibration has 1 of 2 correct images"),
        ({"images_per_second": float("nan")}, "images_per_second = nan"),
        ({"target": "shapes:novel:test"}, "holds 'shapes:novel:test'"),
        ({"target": "shapes"}, "target = 'shapes'"),
        ({"settings__samples": 3}, "3 samples"),
        ({"settings__precision": "bf16"}, "holds 'shapes:base:test' under bf16"),
        ({"temperature": 2.0}, "temperature = 2.0, in settings it is None"),
        ({"config_hash": "00000000"}, "is of run '00000000'"),
        ({"backbone_digest": "0" * 16}, "other weights"),
        ({"checkpoint_sha256": "0" * 64}, "evaluated on shapes:base:test with other weights.*--force"),
        ({"more\x1b[31m": 1}, r"more\\x1b"),
    ],
    TRAIN: [
        ({"config_hash": "00000000"}, "is of run '00000000'"),
        ({"steps": True}, "steps = True"),
        ({"seconds": -1.0}, "seconds = -1.0"),
        ({"epochs__0__terms__ce": float("inf")}, r"epochs.0.terms.ce = inf"),
        ({"fewshot": SAMPLES | {"digest": "0" * 16}}, "samples are not those of digest"),
        ({"fewshot": SAMPLES | {"seed": 9}}, "samples of 16 shots and seed 9: move it away"),
    ],
    CONFIG: [({"seed": 2}, "was moved or changed"), ({"seed": True}, "seed = True")],
}  # fmt: skip


@pytest.mark.parametrize(("file", "fields", "words"), [(file, *row) for file, rows in FIELDS.items() for row in rows])
def test_a_field_that_cannot_be_right_is_refused_by_the_name_of_the_file(runs, capsys, file, fields, words):
    change(runs[0].path / file, **fields)
    assert_table(runs, capsys, words)


def assert_table(runs: list[RunFolder], capsys: pytest.CaptureFixture[str], words: str) -> None:
    """Check that `procap table` leaves out the first run, with `words` in one line, and shows the second."""
    code = main(["table", "--results", str(runs[0].path.parents[5])])
    out, err = capsys.readouterr()
    assert code == 1 and "internal error" not in err and err.count("\n") == 1 and "is left out: " in err, err
    assert re.search(words, err) and "\x1b" not in err, err
    assert str(runs[0].path) in err and "Seed 2." in out, out


FILES: dict[str, tuple[Callable[[RunFolder, RunFolder], object], str]] = {
    "train.json of another run": (lambda one, other: shutil.copy(other.path / TRAIN, one.path), "train.json is of run"),
    "evaluation of another run": (
        lambda one, other: shutil.copy(other.path / EVAL, one.path / EVAL), "base-test.json is of run"
    ),
    "evaluation under another name": (
        lambda one, _: shutil.copy(one.path / EVAL, one.path / "eval/digits-all-test.json"), "all-test.json holds"
    ),
    "no configuration": (lambda one, _: (one.path / CONFIG).unlink(), "no config.json"),
    "renamed": (lambda one, _: one.path.rename(f"{one.path}-old"), "-old was moved"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "words"), [
    (EVAL, "it has 30 GB, the limit is 1 GB"), (CONFIG, "it has 30 GB, the limit is 1 GB"),
    (CHECKPOINT, "it has 30 GB, the limit is 24 GB"),
])  # fmt: skip
def test_a_file_too_large_for_the_memory_is_refused(runs, file, words):
    os.truncate(runs[0].path / file, 30 * 10**9)
    with pytest.raises(UserError, match=words):
        runs[0].read_config()
        runs[0].read_evaluations()
        read_checkpoint(runs[0].checkpoint_file)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_run_or_program_is_refused(runs, capsys, name):
    damage, words = FILES[name]
    damage(*runs)
    assert_table(runs, capsys, words)


@pytest.mark.parametrize("changes", [{"template": "a photo"}, {"templates": ("{} {x}",)}, {"classnames": ()}])
def test_a_checkpoint_of_which_no_prompts_can_be_made_is_refused(runs, tmp_path, changes):
    _, card = read_checkpoint(runs[0].checkpoint_file)
    save_checkpoint(tmp_path / CHECKPOINT, torch.nn.Linear(2, 2), card.model_copy(update=changes))
    with pytest.raises(UserError, match=r"is not a checkpoint of this program \(.*(exactly|at least) one"):
        read_checkpoint(tmp_path / CHECKPOINT)


@pytest.fixture(scope="module")
def paused(few_digits, short_checkpoint, tmp_path_factory) -> tuple[RunConfig, RuntimeConfig]:
    """A training that pauses after the first of two epochs."""
    config = plan_run(
        method="coop", dataset="digits", backbone=str(short_checkpoint), shots=1,
        overrides={"epochs": 2, "batch_size": 5, "optimizer": "adamw"},
    )  # fmt: skip
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("paused"))
    train(config, runtime, until=1)
    return config, runtime


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "run": (lambda content: content["identity"].update(config_hash="0" * 8), "config hash is 00000000"),
    "weights": (lambda content: content["identity"].update(backbone_digest="0" * 16), "backbone digest is 0000"),
    "data": (lambda content: content["identity"].update(manifest_digest="0" * 16), "manifest digest is 0000"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_training_is_refused(paused, tmp_path, name):
    config, runtime = paused
    shutil.copytree(runtime.results, tmp_path / "results")
    state = RunFolder(tmp_path / "results" / config.path).state_folder
    [file] = state.glob("step-*")
    content = torch.load(file, weights_only=True)
    changes, words = STATES[name]
    changes(content)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    file.unlink()
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:16]
    write_bytes(file.with_name(f"{file.stem[:-16]}{digest}.pt"), buffer.getvalue())
    with pytest.raises(UserError, match=words) as caught:
        train(config, replace(runtime, results=tmp_path / "results"))
    assert str(state) in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_are_replaced_after_planning_are_refused(short_checkpoint, few_digits, tmp_path):
    path = tmp_path / "weights.safetensors"
    shutil.copy(short_checkpoint, path)
    config = plan_run(method="zeroshot", dataset="digits", backbone=str(path))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata)
    with pytest.raises(UserError, match=r"the weights .*weights\.safetensors changed after this run was planned"):
        train(config, make_runtime(few_digits, tmp_path))
