"""Files of a run whose numbers or owner cannot be right are refused by name, in one line."""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_results import put_run, put_score
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_runs import make_runtime

from benchmarks.cli import main
from procap.errors import UserError
from runner.checkpoint import save_checkpoint
from runner.config import RunConfig, RuntimeConfig
from runner.planning import plan_run
from runner.results import CheckpointCard, write_bytes
from runner.run_folders import RunFolder
from runner.train import train

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


def bins(**fields: Any) -> dict[str, Any]:
    zeros = [0] * 14
    own = {"ece": 0.0, "count": [40, *zeros], "confidence": [30.0, *zeros], "correct": [30, *zeros], **fields}
    return {"nll": 1.0, "brier": 0.5, "equal_width": own}


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


FIELDS: dict[str, list[tuple[dict[str, Any], str]]] = {
    EVAL: [
        ({"correct": 41, "per_class__correct": [41]}, "more correct images than images"),
        ({"correct": -1}, "correct = -1"),
        ({"correct": True}, "correct = True"),
        ({"correct": "30"}, "correct = '30'"),
        ({"correct": 30.0}, "correct = 30.0"),
        ({"correct": 31}, "31 of 40"),
        ({"total": 0, "correct": 0}, "total = 0"),
        ({"total": 10**30}, "total = 10"),
        ({"per_class__total": [41]}, "30 of 41"),
        ({"per_class__total": [20, 20]}, "numbers of classes"),
        ({"num_classes": 2}, "num_classes is 2"),
        ({"dataset_size": 39}, "dataset_size 39"),
        ({"limit": 5}, "limit 5"),
        ({"labels": [0], "predicted": [0]}, "1 and 1 images"),
        ({"images_per_second": 0.0}, "images_per_second = 0.0"),
        ({"images_per_second_model": -1.0}, "images_per_second_model = -1.0"),
        ({"images_per_second": float("nan")}, "images_per_second = nan"),
        ({"images_per_second": 1e300}, "images_per_second = 1e"),
        ({"seconds": float("inf")}, "seconds = inf"),
        ({"calibration": bins()}, None),  # type: ignore[list-item]
        ({"calibration": bins(ece=3.0)}, "ece is not that of the bins"),
        ({"calibration": bins(count=[39, *[0] * 14])}, "bins of calibration"),
        ({"calibration": bins(count=[40])}, "15 items"),
        ({"target": "shapes:novel:test"}, "holds 'shapes:novel:test'"),
        ({"target": "shapes"}, "target = 'shapes'"),
        ({"settings__samples": 3}, "3 samples"),
        ({"config_hash": "00000000"}, "is of run '00000000'"),
        ({"backbone_digest": "0" * 16}, "other weights"),
        ({"more\x1b[31m": 1}, r"more\\x1b"),
        ({"per_class__names": ["red\x1b[31m"]}, r"'red\\x1b\[31m' holds control characters"),
    ],
    TRAIN: [
        ({"config_hash": "00000000"}, "is of run '00000000'"),
        ({"backbone_digest": "0" * 16}, "different weights"),
        ({"manifest_digest": "0" * 16}, "different weights or data sets"),
        ({"steps": True}, "steps = True"),
        ({"steps": 0}, "0 steps in"),
        ({"seconds": -1.0}, "seconds = -1.0"),
        ({"epochs__0__epoch": 1}, "an epoch is missing"),
        ({"epochs__0__terms__ce": float("inf")}, r"epochs.0.terms.ce = inf"),
    ],
    CONFIG: [({"seed": 2}, "was moved or changed"), ({"seed": True}, "seed = True")],
}  # fmt: skip


@pytest.mark.parametrize(("file", "fields", "words"), [(file, *row) for file, rows in FIELDS.items() for row in rows])
def test_a_field_that_cannot_be_right_is_refused_by_the_name_of_the_file(runs, capsys, file, fields, words):
    change(runs[0].path / file, **fields)
    assert_table(runs, capsys, words)


def assert_table(runs: list[RunFolder], capsys: pytest.CaptureFixture[str], words: str | None) -> None:
    """Whether `procap table` refuses the results with `words` in one line, or without `words` prints them."""

    code = main(["table", "--results", str(runs[0].path.parents[5])])
    out, err = capsys.readouterr()
    if words is None:
        assert code == 0 and "CoOp" in out
        return
    assert code in (1, 2) and out == "" and "internal error" not in err and err.count("\n") == 1, err
    assert re.search(words, err) and "\x1b" not in err, err
    assert str(runs[0].path) in err


FILES: dict[str, tuple[Callable[[RunFolder, RunFolder], object], str]] = {
    "train.json of another run": (lambda one, other: shutil.copy(other.path / TRAIN, one.path), "train.json is of run"),
    "checkpoint of another run": (
        lambda one, other: shutil.copy(other.path / CHECKPOINT, one.path), "checkpoint.safetensors is of run"
    ),
    "evaluation of another run": (
        lambda one, other: shutil.copy(other.path / EVAL, one.path / EVAL), "base-test.json is of run"
    ),
    "evaluation under another name": (
        lambda one, _: shutil.copy(one.path / EVAL, one.path / "eval/digits-all-test.json"), "all-test.json holds"
    ),
    "no configuration": (lambda one, _: (one.path / CONFIG).unlink(), "no config.json"),
    "renamed": (lambda one, _: shutil.copytree(one.path, f"{one.path}-old"), "-old was moved"),
    "no card": (
        lambda one, _: (one.path / CHECKPOINT).write_bytes(b"\x02" + bytes(7) + b"{}"), "no description of this program"
    ),
    "nested metadata": (lambda one, _: put_card(one.path, {"a": [1]}), "no description of this program"),
    "card of a list": (lambda one, _: put_card(one.path, "[]"), "should be an object"),
    **{f"a pipe in place of {name}": (lambda one, _, name=name: put_pipe(one.path / name), "no regular file")
       for name in (EVAL, TRAIN, CHECKPOINT, CONFIG)},
    "a link to a device": (lambda one, _: put_pipe(one.path / EVAL, "/dev/zero"), "no regular file"),
    "card that is nested deeply": (lambda one, _: put_card(one.path, "[" * 10**5), "recursion limit"),
}  # fmt: skip


def put_pipe(file, device=""):
    """Replace a file by a pipe or a link to a device: reading one might never end."""
    file.unlink()
    file.symlink_to(device) if device else os.mkfifo(file)


def put_card(folder, card):
    header = json.dumps({"__metadata__": {"procap": card}}).encode()
    (folder / CHECKPOINT).write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_run_or_program_is_refused(runs, capsys, name):
    damage, words = FILES[name]
    damage(*runs)
    assert_table(runs, capsys, words)


def test_a_run_that_is_there_twice_is_an_error(runs, capsys):
    root = runs[0].path.parents[5]
    copy = root / "merged" / runs[0].path.relative_to(root)
    shutil.copytree(runs[0].path, copy)
    for command in ("table", "report"):
        assert main([*command.split(), "--results", str(root)]) == 1
        err = capsys.readouterr().err
        assert "are the same run" in err and str(copy) in err and err.count("\n") == 1


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


def change_progress(content: dict[str, Any], **fields: Any) -> None:
    content["progress"] = json.dumps(json.loads(content["progress"]) | fields)


STATES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "run": (lambda content: content["identity"].update(config_hash="0" * 8), "config hash is 00000000"),
    "weights": (lambda content: content["identity"].update(backbone_digest="0" * 16), "backbone digest is 0000"),
    "data": (lambda content: content["identity"].update(manifest_digest="0" * 16), "manifest digest is 0000"),
    "step beyond the last": (lambda content: change_progress(content, step=99, step_in_epoch=98), "has no step 99"),
    "unknown field": (lambda content: change_progress(content, other=1), "does not fit this training"),
    "missing part": (lambda content: content.pop("optimizer"), "does not fit this training"),
    "unknown tensor": (lambda content: content["method"].update(other=torch.ones(1)), "does not fit this training"),
    "shape": (lambda content: content["method"].update(context=torch.ones(3, 1)), "does not fit this training"),
    "type": (lambda content: content["method"].update(context=content["method"]["context"].long()), "torch.int64"),
    "NaN": (lambda content: content["method"]["context"].fill_(float("nan")), "context is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_training_is_refused(paused, tmp_path, name):
    config, runtime = paused
    shutil.copytree(runtime.results, tmp_path / "results")
    state = RunFolder(tmp_path / "results" / config.path).state
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
