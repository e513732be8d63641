"""`procap import` and `procap export`: a run leaves for public code and comes back with the same results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tiny_geometry import SHORT_OPTIONS

from benchmarks import results
from benchmarks.cli import main
from procap.methods import METHODS, method_class
from runner.run_folders import RunFolder, find_runs

PUBLIC = [name for name in METHODS if method_class(name).public_layout]
FILES = {"dassl": "model.pth.tar-1", "safetensors": "model.safetensors"}

pytestmark = pytest.mark.usefixtures("at_home")


@pytest.fixture
def flags(few_digits, tiny_checkpoint) -> list[str]:
    """The flags of one small run, without the folder of its results."""
    run = ["--method", "maple", "--datasets", "digits", "--shots", "2", "--epochs", "1", "--option", "depth=2"]
    return [*run, "--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--tracking", "off"]


def only_run(folder: str) -> RunFolder:
    [run] = find_runs(Path(folder))
    return run


def counts(run: RunFolder) -> dict[str, tuple[int, list[int]]]:
    return {one.target: (one.correct, one.per_class.correct) for one in run.evaluations()}


def train_and_import(flags: list[str], *formats: str) -> RunFolder:
    """Train, evaluate, export, import and evaluate a run, whose counts and checkpoint stay the same; returns it."""
    assert main(["train", *flags, "--results", "ours"]) == 0
    assert main(["eval", *flags, "--results", "ours"]) == 0
    ours = only_run("ours")
    for format in formats:
        assert main(["export", str(ours.path), "--format", format]) == 0
        [file] = (Path("export") / ours.path.relative_to("ours")).glob(f"*/{FILES[format]}")
        assert file.is_file()
        assert main(["import", str(file), *flags, "--results", format]) == 0
        assert main(["eval", *flags, "--results", format]) == 0
        imported = only_run(format)
        training = imported.train()
        assert imported.path.name == ours.path.name
        assert training.imported.model_dump() == {
            "name": file.name,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "epoch": 1,
        }
        assert counts(imported) == counts(ours)
        assert imported.checkpoint_file.read_bytes() == ours.checkpoint_file.read_bytes()
    return ours


OPTIONS = {**SHORT_OPTIONS, "coprompt": {"depth": 2, "sentences": "templates"}, "mmrl": {"first_block": 1, "width": 16}}


@pytest.mark.parametrize("method", PUBLIC)
def test_a_run_of_every_method_with_public_code_goes_out_and_comes_back(method, few_digits, short_checkpoint):
    flags = ["--method", method, "--datasets", "digits", "--shots", "1", "--epochs", "1", "--batch-size", "5"]
    options = [f"--option={name}={value}" for name, value in OPTIONS.get(method, {}).items()]
    where = ["--backbone", str(short_checkpoint), "--data", str(few_digits), "--tracking", "off"]
    is_dassl = method_class(method).public_layout.dassl
    run = train_and_import(
        [*flags, "--recipe-field", "warmup=none", *options, *where], "dassl" if is_dassl else "safetensors"
    )
    assert main(["export", str(run.path), "--out", "again"]) == (0 if is_dassl else 1)


def test_a_run_goes_out_in_both_formats_and_tables_mark_it(capsys, flags):
    ours = train_and_import(flags, *FILES)
    assert (Path("export") / ours.path.relative_to("ours") / "MultiModalPromptLearner").is_dir()
    assert results.load("dassl").imported.all() and not results.load("ours").imported.any()
    capsys.readouterr()
    assert main(["table", "--results", "dassl"]) == 0
    assert "IMPORTED checkpoints, trained elsewhere: MaPLe on digits (seed 1)." in capsys.readouterr().out
    assert main(["ls", "runs", "--results", "dassl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["state"] == "imported"


def learned(n_ctx: int = 2) -> dict[str, torch.Tensor]:
    """What MaPLe's trainer learns at depth 2."""
    state = {"prompt_learner.ctx": torch.ones(n_ctx, 64), "prompt_learner.compound_prompts_text.0": torch.ones(2, 64)}
    for name in ("proj", "compound_prompt_projections.0"):
        state |= {f"prompt_learner.{name}.weight": torch.ones(128, 64), f"prompt_learner.{name}.bias": torch.ones(128)}
    return state


def test_wrong_imports_are_one_line_each_and_write_nothing(capsys, flags, tmp_path):
    def fail(file: str, *more: str) -> str:
        lines = []
        for mode in ([], ["--dry-run"]):
            capsys.readouterr()
            assert main(["import", file, *flags, *more, *mode]) in (1, 2)
            lines.append(capsys.readouterr().err.splitlines()[-1])
        assert lines[0] == lines[1]
        return lines[0]

    def save(name: str, **content: object) -> str:
        torch.save(content, tmp_path / name)
        return str(tmp_path / name)

    good = save("good", state_dict=learned(), epoch=1)
    assert "no weights file at nowhere" in fail("nowhere")
    assert "prompt_learner.ctx is [4, 64], expected [2, 64]" in fail(save("long", state_dict=learned(4), epoch=1))
    broken = learned() | {"prompt_learner.ctx": torch.full((2, 64), float("nan"))}
    assert "context is not finite in the file" in fail(save("broken", state_dict=broken, epoch=1))
    assert "write {dataset} and {seed} into its path" in fail(good, "--seeds", "1,2")
    assert "unknown task 'few-shots': did you mean few-shot" in fail(good, "--task", "few-shots")
    assert not list(Path("results").rglob("*.json"))

    assert main(["import", good, *flags]) == 0
    run = only_run("results")
    before = run.train_file.read_bytes()
    assert main(["import", good, *flags]) == 0
    assert run.train_file.read_bytes() == before
    other = save("other", state_dict=learned() | {"prompt_learner.ctx": torch.zeros(2, 64)}, epoch=1)
    assert "is a run already" in fail(other)
    assert main(["import", other, *flags, "--force"]) == 0
    assert run.train().imported.name == "other"


def test_each_run_takes_its_own_file(capsys, flags, tmp_path):
    for seed in (1, 2):
        torch.save({"state_dict": learned(), "epoch": 3}, tmp_path / f"digits-{seed}.tar")
    path = str(tmp_path / "{dataset}-{seed}.tar")
    assert main(["import", path, *flags, "--seeds", "1,2", "--dry-run"]) == 0
    assert "digits-2.tar" in capsys.readouterr().out and not Path("results").exists()
    with pytest.warns(UserWarning, match="was trained for 3 epochs and the recipe"):
        assert main(["import", path, *flags, "--seeds", "1,2"]) == 0
    assert {run.train().imported.name for run in find_runs(Path("results"))} == {"digits-1.tar", "digits-2.tar"}


def test_a_method_without_public_code_is_not_exported(capsys, flags):
    zeroshot = [word for word in flags if word not in ("--option", "depth=2")]
    zeroshot[1] = "zeroshot"
    assert main(["train", *zeroshot]) == 0
    capsys.readouterr()
    assert main(["export", str(only_run("results").path)]) == 1
    assert "ZeroShot has no public code" in capsys.readouterr().err
    assert main(["export", "nowhere", "--format", "onnx"]) == 2
