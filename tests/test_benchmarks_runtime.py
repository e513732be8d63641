"""The runtime benchmark: its counting is torch's own, its table says what was not run, its modes agree."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cli import main
from benchmarks.flops import evaluation, training_step
from benchmarks.runtime_data import class_names, open_contest, prepare
from benchmarks.runtime_measure import Spread, interleaved, peak_bytes
from benchmarks.runtime_modes import classifier_of, towers
from benchmarks.runtime_report import published
from benchmarks.runtime_targets import targets, targets_table
from procap.methods import build_method
from procap.methods.procap import PROCAP_RECIPE
from procap.mini import load_mini
from procap.savings import NO_SAVINGS, Savings
from procap.text import LabelSpace

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ONE_BY_ONE = [replace(NO_SAVINGS, **{name: True}) for name in ("trim", "pack", "prefix", "last_rows", "frozen_rows")]
QUICK = ("--datasets", "digits", "--repeats", "1", "--tracking", "off", "--budget", "10", "--batch", "8")


@pytest.fixture(scope="module")
def mini():
    return load_mini()


def build(clip, name, classes=7):
    options = {"n_ctx": 4} if name == "maple" else {}
    return build_method(name, clip, LabelSpace(class_names(classes)), options, torch.Generator().manual_seed(0))


def random_images(clip, count):
    size = clip.geometry.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def counted(work):
    with FlopCounterMode(display=False) as counter:
        result = work()
    return counter.get_total_flops(), result


def run(capsys, *arguments):
    capsys.readouterr()
    code = main(["bench", "runtime", *map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out, captured.err


@pytest.mark.parametrize("savings", [NO_SAVINGS, Savings(), *ONE_BY_ONE], ids=str)
@pytest.mark.parametrize("name", ["coop", "cocoop", "maple", "procap"])
def test_counted_training_step_is_what_torch_counts(mini, name, savings):
    """To half a percent: the attention between a handful of prompt tokens is not worth counting."""
    method, images = build(mini.with_savings(savings), name), random_images(mini, 3)
    labels, noise = torch.tensor([0, 1, 2]), torch.Generator().manual_seed(0)
    forward, loss = counted(lambda: torch.stack(list(method.loss(images, labels, method.draw(noise)).values())).sum())
    backward, _ = counted(loss.backward)
    work = training_step(method, 3, executed=True)
    assert forward == pytest.approx(work.forward, rel=5e-3)
    assert backward == pytest.approx(work.backward, rel=5e-3)


@pytest.mark.parametrize("name", ["zeroshot", "coop", "cocoop", "maple", "procap"])
@pytest.mark.parametrize("mode", ["reference", "fast"])
def test_counted_evaluation_is_what_torch_counts(mini, name, mode):
    """In reference mode prompts and classes are encoded for every batch, in fast mode not even for the first."""
    # Torch's counter asks every weight for its place in the graph, which inference mode has not got.
    method, images = build(towers(mini, mode), name).requires_grad_(False), random_images(mini, 3)
    classify = classifier_of(method, mode)
    for _ in range(2):
        found, _ = counted(lambda: classify(images))
        work = evaluation(method, 3, every_batch=mode == "reference", executed=True)
        assert found == pytest.approx(work.forward, rel=5e-3)


def test_needed_work_is_never_more_than_executed_work(mini):
    for name in ("coop", "maple", "procap"):
        method = build(mini, name, classes=40)
        needed, executed = training_step(method, 4), training_step(method, 4, executed=True)
        assert needed.forward <= executed.forward and needed.backward <= executed.backward
    reference = build(towers(mini, "reference"), "procap", classes=40)
    assert training_step(reference, 4) == training_step(reference, 4, executed=True)


@pytest.mark.parametrize("name", ["zeroshot", "coop", "cocoop", "maple", "procap"])
def test_modes_give_the_same_logits(mini, name):
    images = random_images(mini, 4)
    logits = [classifier_of(build(towers(mini, mode), name), mode)(images) for mode in ("reference", "fast")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-3)


def test_reference_towers_share_the_weights(mini):
    twin = towers(mini, "reference")
    assert twin.savings == NO_SAVINGS and mini.savings == Savings()
    assert twin.visual.proj.data_ptr() == mini.visual.proj.data_ptr()


def test_peak_memory_counts_tensors_alive_at_once():
    def work():
        first = torch.ones(250_000)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(work, CPU) == pytest.approx(2_000_000, rel=1e-3)


def test_rounds_are_interleaved_and_nobody_always_goes_first():
    order = []
    seconds = interleaved([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert "".join(order) == "abbaab"
    assert [len(values) for values in seconds] == [3, 3]


def test_spread_of_rates_turns_the_order_round():
    spread = Spread.of([1.0, 4.0, 2.0])
    assert spread == Spread(2.0, 1.0, 4.0, 3)
    assert spread.rate(8) == Spread(4.0, 2.0, 8.0, 3)


def test_whole_trainings_of_both_modes_agree(capsys, few_digits, tmp_path):
    """One epoch from the same start over the same images: equal accuracy, and files beside the paper's rows."""
    flags = ("--epochs", "1", "--scaling", "10,20x2", "--methods", "zeroshot,procap", "--batch", "32", "--json")
    out, _ = run(capsys, *QUICK, *flags, "--budget", "0", "--data", few_digits, "--results", tmp_path)
    report = json.loads(out.splitlines()[-1])
    rows = {(row["method"], row["mode"]): row for row in report["rows"]}
    assert len(rows) == 4
    trained = [rows["procap", mode] for mode in ("reference", "fast")]
    assert trained[0]["correct"] == trained[1]["correct"] and trained[0]["accuracy"] is not None
    assert trained[0]["first_loss"] == pytest.approx(trained[1]["first_loss"], rel=1e-4)
    for row in trained:
        assert not row["extrapolated"] and row["steps_measured"] == row["steps"] > 0
        phases = row["phases"]
        model = sum(phases[name] for name in ("forward", "backward", "optimizer"))
        assert 0 < model + phases["data"] <= row["train_seconds"] * 1.01
        assert all(phases[name] > 0 for name in ("load", "decode", "augment", "evaluation"))
        assert 0 < row["share_of_peak"]["train"] < 1.5
    assert trained[1]["peak_bytes"]["train"] < trained[0]["peak_bytes"]["train"]
    assert trained[1]["flops"]["step"] < trained[0]["flops"]["step"]
    assert rows["zeroshot", "fast"]["train_seconds"] is None
    assert {(one["point"]["kind"], one["point"]["classes"]) for one in report["scaling"]} == {
        (kind, classes) for kind in ("train", "eval") for classes in (10, 20)
    }
    folder = Path(report["folder"])
    assert folder.is_relative_to(tmp_path / "runtime")
    names = {path.name for path in folder.iterdir()}
    assert {"runtime.md", "runtime.csv", "runtime.tex", "runtime.json", "runtime-bars.png", "runtime-classes.png",
            "runtime-accuracy.png"} <= names  # fmt: skip
    assert json.loads((folder / "runtime.json").read_text())["rows"] == report["rows"]
    with (folder / "runtime.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines if line["mode"] == "published"] == [row["method"] for row in published()]
    assert "≈" not in (folder / "runtime.md").read_text()
    assert "278.8" in out and "415.9" in (folder / "runtime.tex").read_text()


def test_what_was_not_run_is_said(capsys, few_digits, tmp_path):
    """Two steps are no training: the time is marked, the accuracy is missing, as it is for random weights."""
    flags = ("--methods", "procap", "--steps", "2", "--random", "--scaling", "off", "--json")
    out, _ = run(capsys, *QUICK, *flags, "--data", few_digits, "--results", tmp_path)
    report = json.loads(out.splitlines()[-1])
    for row in report["rows"]:
        assert row["extrapolated"] and row["steps_measured"] == 2 < row["steps"]
        assert row["accuracy"] is None and row["accuracy_note"] == "the weights are random"
    assert "≈ EXTRAPOLATED" in out and f"2 of {report['rows'][0]['steps']}" in out
    assert "random weights" in out
    assert report["settings"]["pretrained"] == "random"


def test_check_lists_every_target_and_claims_nothing_unmeasured(capsys, few_digits, tmp_path):
    flags = ("--methods", "procap", "--modes", "fast", "--steps", "1", "--scaling", "off", "--json")
    out, _ = run(capsys, *QUICK, *flags, "--data", few_digits, "--results", tmp_path)
    report = json.loads(out.splitlines()[-1])
    listed = targets(report)
    assert targets_table(report["targets"]).count("not measured") == len(listed)
    assert {target.state for target in listed} == {"not measured"}
    assert sum("H200" in target.what for target in listed) == 2
    assert sum(target.what.startswith("mini:") for target in listed) == 12
    assert sum(target.what.startswith("CPU, ViT-B/16") for target in listed) == 6


def test_check_measures_what_has_targets_here(capsys, few_digits, tmp_path, monkeypatch):
    """The whole road of `--check` on a CPU, with the small model in the place of the large one."""
    monkeypatch.setattr("benchmarks.runtime_targets.FULL", "mini")
    monkeypatch.setattr("benchmarks.runtime_targets.CPU_RATIOS", (("train", 51, 4, 0.01), ("eval", 51, 4, 1e6)))
    flags = ("--methods", "procap", "--modes", "fast", "--steps", "1", "--scaling", "off", "--check")
    out, _ = run(capsys, *QUICK, *flags, "--data", few_digits, "--results", tmp_path)
    states = {line[12:].strip(): line[:12].strip() for line in out.splitlines() if "CPU, ViT-B/16" in line}
    assert [state for what, state in states.items() if "training step, 51 classes" in what] == ["met"]
    assert [state for what, state in states.items() if "evaluation, 51 classes" in what] == ["NOT MET"]
    assert any(line.startswith("met") and "peak memory of the step" in line for line in out.splitlines())


def test_targets_are_judged_by_their_own_mode(capsys):
    def row(method, fps, step):
        return {"dataset": "d", "mode": "fast", "precision": "fp32", "method": method,
                "flops": {"step": step, "image": 1.0},
                "encoder_fps": {"median": fps}, "step_seconds": {"median": step},
                "peak_bytes": {"train": 1}}  # fmt: skip

    report = {"rows": [row("zeroshot", 100.0, 1.0), row("maple", 100.0, 1.0), row("procap", 98.0, 1.2)],
              "scaling": [], "device": {"type": "cpu", "name": "CPU", "bf16": False},
              "backbone": {"name": "mini"}}  # fmt: skip
    states = {target.what: target.state for target in targets(report)}
    assert states["FPS, ProCAP over zero-shot, d fast fp32"] == "met"
    assert states["FPS, ProCAP over MaPLe-style, d fast fp32"] == "met"
    assert states["step, ProCAP over MaPLe-style, d fast fp32"] == "NOT MET"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--modes", "quick"), "reference, fast"),
        (("--precision", "fp8"), "fp32, bf16"),
        (("--epochs", "0"), "--epochs"),
        (("--random", "--pretrained", "openai"), "--random"),
        (("--methods", "mapel"), "maple"),
    ],
)
def test_wrong_flags_are_answered_in_one_line(capsys, flags, told):
    assert main(["bench", "runtime", *flags]) == 2
    answer = capsys.readouterr().err
    assert answer.count("\n") == 1 and told in answer


def test_photographs_have_the_size_of_their_name(tmp_path, mini):
    root = prepare("photographs-3", tmp_path / "data", tmp_path / "made")
    contest = open_contest("photographs-3", root, 16, 1, mini, PROCAP_RECIPE)
    assert (len(contest.fewshot.train), len(contest.test.images), len(contest.space.classnames)) == (48, 12, 3)
    assert contest.made_up and contest.fewshot.train.image(0).size in ((500, 375), (375, 500))
    assert min(contest.decode, contest.augment, contest.transform) > 0


def test_class_names_are_distinct_and_of_different_lengths():
    names = class_names(1000)
    assert len(set(names)) == 1000
    assert len({len(name.split()) for name in names[:50]}) > 1
    assert class_names(10) == names[:10]


def test_it_runs_where_ray_mlflow_and_deepspeed_are_not_installed(few_digits, tmp_path):
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('ray', 'mlflow', 'deepspeed'): raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from benchmarks.cli import main\n"
        f"sys.exit(main(['bench', 'runtime', *{QUICK!r}, '--methods', 'maple', '--steps', '1', '--scaling', 'off',"
        f" '--data', {str(few_digits)!r}, '--results', {str(tmp_path)!r}]))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "MaPLe-style" in done.stdout


def test_help_needs_no_torch():
    program = (
        "import sys; from benchmarks.cli import main; main(['bench', 'runtime', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib')))"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--check" in done.stdout and time.perf_counter() - began < 30


@pytest.mark.slow
def test_rows_become_mlflow_runs(capsys, few_digits, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    flags = ("--datasets", "digits", "--repeats", "1", "--steps", "1", "--scaling", "off", "--methods", "maple")
    run(capsys, *flags, "--data", few_digits, "--results", tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = (e for e in client.search_experiments() if e.name == "procap")
    runs = client.search_runs([experiment.experiment_id])
    assert {found.data.params["mode"] for found in runs} == {"reference", "fast"}
    assert all(found.data.metrics["encoder_fps/median"] > 0 for found in runs)
    assert all(found.info.status == "FINISHED" for found in runs)
