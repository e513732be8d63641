"""The runtime benchmark by its command line: modes agree, tables mark what was not run, targets are compared."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cli import main
from benchmarks.results.profiles import MINI, PAPER, Profile
from benchmarks.results.suite import SuiteResults
from benchmarks.runtime.benchmark import measure_suite, write
from benchmarks.runtime.data import class_names, load_case_data
from benchmarks.runtime.settings import Flags, make_settings
from benchmarks.runtime.targets import format_targets, list_targets
from benchmarks.suites import suite_named
from benchmarks.tables.runtime import runtime_tables
from runner.config import RuntimeConfig
from runner.results import write_json

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
QUICK = ("--datasets", "digits", "--repeats", "1", "--tracking", "off", "--budget", "0", "--batch", "8")


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch):
    """The matrix products whose rate is the peak, small ones."""
    monkeypatch.setattr("benchmarks.runtime.measure.PEAK_SIZES", {"cpu": (768,)})
    monkeypatch.setattr("benchmarks.runtime.measure.PEAK_SECONDS", 0.05)


@pytest.fixture
def without_plots(monkeypatch):
    """Drawing takes seconds; one test looks at what is drawn."""
    monkeypatch.setattr("benchmarks.plots.save_plots", lambda folder, plots: [])


def run(capsys, *arguments, code=0):
    capsys.readouterr()
    returned = main(["bench", "runtime", *map(str, arguments)])
    captured = capsys.readouterr()
    assert returned == code, captured.err
    return captured.out


def test_whole_trainings_of_both_modes_agree(capsys, few_digits, tmp_path):
    """One epoch from the same start over the same images: equal accuracy, and files beside the paper's rows.

    Fast mode augments from decoded pixels, as it does on a GPU.
    """
    flags = ("--accelerate", "images", "--epochs", "1", "--scaling", "10,20x2", "--methods", "zeroshot,procap")
    flags += ("--batch", "32", "--json")
    out = run(capsys, *QUICK, *flags, "--data", few_digits, "--results", tmp_path)
    report = json.loads(out.splitlines()[-1])
    rows = {(row["method"], row["mode"]): row for row in report["rows"]}
    assert len(rows) == 4
    trained = [rows["procap", mode] for mode in ("reference", "fast")]
    assert trained[0]["correct"] == trained[1]["correct"] and trained[0]["accuracy"] is not None
    for loss in ("first_loss", "last_loss"):
        assert trained[0][loss] == pytest.approx(trained[1][loss], rel=1e-3)
    assert "Accelerations of fast mode: images (`--accelerate`); of reference mode: none." in out
    for row in trained:
        assert not row["extrapolated"] and row["steps_measured"] == row["steps"] > 0
        phases = row["phases"]
        model = sum(phases[name] for name in ("forward", "backward", "optimizer"))
        assert 0 < model + phases["data"] <= row["train_seconds"] * 1.01
        assert all(phases[name] > 0 for name in ("load", "data", "evaluation"))
        flops, peak = row["flops"], report["matmul_peak"][row["precision"]]
        train, evaluation = flops["step"] / row["step_seconds"]["median"], flops["image"] * row["encoder_fps"]["median"]
        rates = {"train": train, "eval": evaluation}
        assert row["flops_per_second"] == pytest.approx(rates) and min(rates.values()) > 0
        assert row["share_of_peak"] == pytest.approx({kind: rate / peak for kind, rate in rates.items()})
    assert trained[1]["peak_bytes"]["train"] < trained[0]["peak_bytes"]["train"]
    assert trained[1]["flops"]["step"] < trained[0]["flops"]["step"]
    assert rows["zeroshot", "fast"]["train_seconds"] is None
    assert {(one["point"]["kind"], one["point"]["classes"]) for one in report["scaling"]} == {
        (kind, classes) for kind in ("train", "eval") for classes in (10, 20)
    }
    folder = Path(report["folder"])
    assert folder.is_relative_to(tmp_path / "runtime")
    names = {path.name for path in folder.iterdir()}
    assert {"runtime.md", "runtime.csv", "runtime.tex", "runtime.json", "runtime-classes.png"} <= names
    assert json.loads((folder / "runtime.json").read_text())["rows"] == report["rows"]
    with (folder / "runtime.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["source"] for line in lines] == ["ours"] * 4 + ["published"] * 4
    assert "EXTRAPOLATED" not in (folder / "runtime.md").read_text()
    assert "278.8" in out and "415.9" in (folder / "runtime.tex").read_text()


def test_extrapolated_and_random_results_are_marked(capsys, few_digits, tmp_path, without_plots):
    """Two steps are no training: the time is marked, the accuracy is missing, as it is for random weights."""
    flags = ("--methods", "procap", "--steps", "2", "--random", "--scaling", "off", "--json")
    out = run(capsys, *QUICK, *flags, "--data", few_digits, "--results", tmp_path)
    report = json.loads(out.splitlines()[-1])
    for row in report["rows"]:
        assert row["extrapolated"] and row["steps_measured"] == 2 < row["steps"]
        assert row["accuracy"] is None and row["accuracy_note"] == "the weights are random"
    assert "≈ EXTRAPOLATED" in out and f"2 of {report['rows'][0]['steps']}" in out
    assert "random weights" in out
    assert report["settings"]["pretrained"] == "random"


def test_without_time_each_row_has_one_step_and_no_target_is_measured(capsys, few_digits, tmp_path, without_plots):
    flags = ("--methods", "procap", "--modes", "fast", "--budget", "0.01", "--scaling", "10x2", "--json")
    out = run(capsys, *QUICK, *flags, "--test-batch", "8", "--data", few_digits, "--results", tmp_path)
    report = json.loads(out.splitlines()[-1])
    (row,) = report["rows"]
    assert (row["steps_measured"], row["test_images"], row["extrapolated"]) == (1, 8, True)
    assert row["train_seconds"] > 0 and report["scaling"] == [] and "1 of" in out
    listed = list_targets(report)
    assert format_targets(listed).count("not measured") == len(listed)
    assert {target.state for target in listed} == {"not measured"}
    assert sum("H200" in target.what for target in listed) == 2
    assert sum(target.what.startswith("mini:") for target in listed) == 12
    assert sum(target.what.startswith("CPU, ViT-B/16") for target in listed) == 6


def test_check_exits_with_4_if_a_target_is_not_met(capsys, few_digits, tmp_path, monkeypatch, without_plots):
    """On a CPU, with the small model in the place of the large one."""
    monkeypatch.setattr("benchmarks.runtime.targets.FULL", "mini")
    monkeypatch.setattr("benchmarks.runtime.targets.CPU_RATIOS", (("train", 5, 4, 0.01), ("eval", 5, 4, 1e6)))
    flags = ("--methods", "procap", "--modes", "fast", "--steps", "1", "--scaling", "off", "--check")
    flags += ("--test-batch", "8")
    out = run(capsys, *QUICK, *flags, "--data", few_digits, "--results", tmp_path, code=4)
    states = {line[12:].strip(): line[:12].strip() for line in out.splitlines() if "CPU, ViT-B/16" in line}
    assert [state for what, state in states.items() if "training step, 5 classes" in what] == ["met"]
    assert [state for what, state in states.items() if "evaluation, 5 classes" in what] == ["NOT MET"]
    assert any(line.startswith("met") and "peak memory of the step" in line for line in out.splitlines())


def test_methods_are_compared_within_a_mode():
    def row(method, fps, step):
        return {"dataset": "d", "mode": "fast", "precision": "fp32", "method": method,
                "flops": {"step": step, "image": 1.0},
                "encoder_fps": {"median": fps}, "step_seconds": {"median": step},
                "peak_bytes": {"train": 1}}  # fmt: skip

    report = {"rows": [row("zeroshot", 100.0, 1.0), row("maple", 100.0, 1.0), row("procap", 98.0, 1.2)],
              "scaling": [], "device": {"type": "cpu", "name": "CPU", "bf16": False},
              "backbone": {"name": "mini"}}  # fmt: skip
    states = {target.what: target.state for target in list_targets(report)}
    assert states["FPS, ProCAP over zero-shot, d fast fp32"] == "met"
    assert states["FPS, ProCAP over MaPLe-style, d fast fp32"] == "met"
    assert states["step, ProCAP over MaPLe-style, d fast fp32"] == "NOT MET"


def test_targets_of_an_h200_need_a_whole_training():
    row = {"dataset": "photographs-102", "method": "procap", "mode": "fast", "precision": "bf16", "epochs": 10,
           "batch": 32, "extrapolated": False, "train_seconds": 3.5, "step_seconds": None,
           "encoder_fps": {"median": 8000.0}, "peak_bytes": {"train": 1}}  # fmt: skip
    report = {"rows": [row], "scaling": [], "backbone": {"name": "ViT-B-16"},
              "device": {"type": "cuda", "name": "NVIDIA H200", "bf16": True}}  # fmt: skip
    speed, seconds = (target for target in list_targets(report) if target.what.startswith("H200"))
    assert (speed.state, seconds.state) == ("NOT MET", "met")
    row["extrapolated"] = True
    _, seconds = (target for target in list_targets(report) if target.what.startswith("H200"))
    assert (seconds.state, seconds.remark) == ("not measured", "not trained to the end")


class MeasuringBegan(Exception):
    """A measurement was begun."""


@pytest.fixture(scope="module")
def measured(few_digits, tmp_path_factory):
    """The suite after a measurement with time for a step in each mode, and a function that measures it again."""
    suite, results = suite_named("runtime"), tmp_path_factory.mktemp("results")
    done = SuiteResults.read(suite, suite.options(MINI, datasets=("digits",), methods=("procap",)), results)
    place = RuntimeConfig(few_digits, results, device="cpu", tracking_uri="off")

    def ask(force: bool = False) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("benchmarks.runtime.measure.PEAK_SIZES", {"cpu": (256,)})
            patched.setattr("benchmarks.runtime.measure.PEAK_SECONDS", 0.01)
            patched.setattr("benchmarks.runtime.settings.SMALL_BUDGET", 0.01)
            patched.setattr("benchmarks.plots.save_plots", lambda folder, plots: [])
            measure_suite(done, place, force)

    ask()
    return done, ask


def test_a_measurement_is_repeated_unless_the_same_is_there_from_such_a_machine(measured, monkeypatch, capsys):
    def begun(*_, **__):
        raise MeasuringBegan

    done, ask = measured
    monkeypatch.setattr("benchmarks.runtime.benchmark.measure", begun)
    ask()
    assert "measured already" in capsys.readouterr().err
    with pytest.raises(MeasuringBegan):
        ask(force=True)
    (file,) = (done.results / "runtime").glob("*/runtime.json")
    whole = file.read_text()
    known = json.loads(whole)
    other_cpu = {**known["environment"], "cpu": {**known["environment"]["cpu"], "name": "another"}}
    others = [{"failed": {"cross-attention": "no room"}, "rows": []}, {"schema": 2}, {"environment": other_cpu},
              {"device": {**known["device"], "name": "NVIDIA H200"}}, {"settings": {}}]  # fmt: skip
    try:
        for text in (*(json.dumps({**known, **other}) for other in others), whole[:-9], "[]", '{"schema": 3}'):
            file.write_text(text)
            with pytest.raises(MeasuringBegan):
                ask()
    finally:
        file.write_text(whole)


@pytest.mark.parametrize(("profile", "quick"), [(MINI, True), (PAPER, False)])
def test_the_command_of_the_suite_measures_what_the_suite_does(tmp_path, monkeypatch, profile: Profile, quick: bool):
    asked = []

    def begun(settings, *_, **__):
        asked.append(settings)
        raise MeasuringBegan

    monkeypatch.setattr("benchmarks.runtime.benchmark.measure", begun)
    suite = suite_named("runtime")
    done = SuiteResults.read(suite, suite.options(profile, quick=quick, data=tmp_path / "data"), tmp_path)
    with pytest.raises(MeasuringBegan):
        suite.finish(done, RuntimeConfig(tmp_path / "data", tmp_path, device="cpu"), True)
    words = shlex.split(suite.command(done.options, tmp_path))
    assert words[-4:] == ["--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    main([*words[1:], "--device", "cpu"])
    assert asked[0] == asked[1]


def test_another_measurement_leaves_the_one_of_the_suite(measured, tmp_path, without_plots):
    suite, _ = measured
    done = replace(suite, results=tmp_path)
    (file,) = (suite.results / "runtime").glob("*/runtime.json")
    place = RuntimeConfig(tmp_path / "data", tmp_path, tracking_uri="off")
    report = json.loads(file.read_text())
    other = {**report, "rows": [{**row, "dataset": "tiles"} for row in report["rows"]]}
    for flags, found in ((Flags(datasets="digits"), report), (Flags(datasets="tiles"), other)) * 2:
        write(found, make_settings(flags, place, CPU), place)
    assert len([*(tmp_path / "runtime").glob("*/runtime.json")]) == 2
    assert runtime_tables(done)


def test_extrapolated_seconds_have_a_column_of_their_own_and_are_never_the_best(measured, tmp_path):
    suite, _ = measured
    done = replace(suite, options=replace(suite.options, methods=("maple", "procap")), results=tmp_path)
    (file,) = (suite.results / "runtime").glob("*/runtime.json")
    report = json.loads(file.read_text())
    own = [{**row, "train_seconds": 5.0} for row in report["rows"]]
    report["rows"] = own + [{**row, "method": "maple", "title": "MaPLe", "train_seconds": 9.0} for row in own]

    def tables(whole=()):
        rows = [{**row, "extrapolated": (row["method"], row["mode"]) not in whole} for row in report["rows"]]
        write_json(tmp_path / "runtime" / "x" / "runtime.json", {**report, "rows": rows})
        return runtime_tables(done)

    for table in tables():
        assert [column.title for column in table.columns][:2] == ["≈ training s", "FPS encoder"]
        assert all(row.cells[0] for row in table.rows) and any("≈" in note for note in table.notes)
        assert not [place for place in table.marks() if place[1] == 0]
    speed, ratios = tables([("maple", "reference"), ("maple", "fast"), ("procap", "reference")])
    assert [column.title for column in speed.columns][:2] == ["training s", "≈ training s"]
    given = {row.labels[1:]: [cell is not None for cell in row.cells[:2]] for row in speed.rows}
    assert given.pop(("ProCAP", "fast")) == [False, True] and list(given.values()) == [[True, False]] * 3
    assert {place[1] for place in speed.marks()} >= {0} and not [place for place in speed.marks() if place[1] == 1]
    assert [[cell is not None for cell in row.cells[:2]] for row in ratios.rows] == [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--modes", "quick"), "reference, fast"),
        (("--precision", "fp8"), "fp32, bf16"),
        (("--epochs", "0"), "--epochs"),
        (("--random", "--pretrained", "openai"), "--random"),
        (("--methods", "mapel"), "maple"),
        (("--budget", "nan"), "--budget nan"),
        (("--budget", "-5"), "--budget -5"),
        (("--scaling", "0x4"), "--scaling 0x4"),
        (("--scaling", "10x0"), "--scaling 10x0"),
    ],
)
def test_wrong_flags_are_answered_in_one_line(capsys, flags, message):
    assert main(["bench", "runtime", *flags]) == 2
    answer = capsys.readouterr().err
    assert answer.count("\n") == 1 and message in answer


def test_photographs_have_the_size_of_their_name(tmp_path):
    data = load_case_data("photographs-3", tmp_path / "data", tmp_path / "made")
    assert (len(data.fewshot.train), len(data.test.images), len(data.space.classnames)) == (48, 12, 3)
    assert data.synthetic and data.fewshot.train.image(0).size in ((500, 375), (375, 500))


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
        "        if name.split('.')[0] in ('ray', 'mlflow', 'deepspeed', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import benchmarks.runtime.measure\n"
        "benchmarks.runtime.measure.PEAK_SECONDS = 0.01\n"
        "from benchmarks.cli import main\n"
        f"sys.exit(main(['bench', 'runtime', *{QUICK!r}, '--methods', 'maple', '--modes', 'fast', '--steps', '1',"
        f" '--scaling', 'off', '--data', {str(few_digits)!r}, '--results', {str(tmp_path)!r}]))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "MaPLe-style" in done.stdout and "matplotlib is not installed" in done.stderr


def test_help_needs_no_torch():
    program = (
        "import sys; from benchmarks.cli import main; main(['bench', 'runtime', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "--check" in done.stdout
