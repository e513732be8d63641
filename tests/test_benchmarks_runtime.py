"""The runtime benchmark: modes agree, tables mark what was not run, targets are compared, rows are in MLflow."""

import csv
import json
import os
import shutil
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from benchmarks.cli import main
from benchmarks.experiment.profiles import MINI
from benchmarks.results.suite import SuiteResults
from benchmarks.runtime.benchmark import measure, measure_suite, write
from benchmarks.runtime.data import class_names, load_case_data
from benchmarks.runtime.measure import count_flops
from benchmarks.runtime.settings import METHOD_OPTIONS, Settings, flags_of_options, make_settings
from benchmarks.runtime.speed_targets import CPU_RATIOS, list_targets
from benchmarks.suites import load_suite
from benchmarks.tables.runtime import runtime_tables
from procap.errors import UserError
from runner.acceleration import Acceleration
from runner.config import RuntimeConfig
from runner.results import write_json

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runtime(few_digits, mlflow_database, tmp_path_factory) -> RuntimeConfig:
    results = tmp_path_factory.mktemp("results")
    shutil.copy(mlflow_database, results)
    return RuntimeConfig(few_digits, results, device="cpu")


@pytest.fixture(scope="module")
def report(runtime, short_checkpoint):
    """One epoch of ProCAP and zero-shot CLIP, and four sizes; fast mode augments from decoded pixels, as on a GPU."""
    settings = make_settings(
        runtime, CPU, methods="zeroshot,procap", datasets="digits", backbone=str(short_checkpoint), budget=0,
        scaling="5,10x2",
    )  # fmt: skip
    settings = replace(settings, epochs=1, repeats=1, accelerations=Acceleration(images=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(METHOD_OPTIONS, "procap", {"depth": 3})
        patched.setattr("benchmarks.runtime.measure.PEAK_SIZES", {"cpu": (256,)})
        patched.setattr("benchmarks.runtime.measure.PEAK_SECONDS", 0.01)
        # The counts are the same with data, which is faster for a model as small as this.
        patched.setattr("benchmarks.runtime.workload.count_flops", partial(count_flops, compute=True))
        found = measure(settings, runtime, CPU)
    write(found, settings, runtime)
    return found


@pytest.fixture
def suite(report, runtime, tmp_path):
    """The suite with the report as its measurement, and its runtime; each test has a copy."""
    definition = load_suite("runtime")
    options = definition.options(MINI, datasets=("digits",), methods=("zeroshot", "procap"))
    place = replace(runtime, results=tmp_path, tracking_uri="off")
    settings = make_settings(place, CPU, **flags_of_options(options))
    copy = {**report, "settings": json.loads(json.dumps(asdict(settings))), "backbone": {"name": "mini", "weights": ""}}
    write_json(tmp_path / "runtime" / "x" / "runtime.json", copy)
    return SuiteResults.read(definition, options, tmp_path), place


def test_whole_trainings_of_both_modes_agree(report):
    """Both modes start from the same weights and use the same images."""
    rows = {(row["method"], row["mode"]): row for row in report["rows"]}
    assert len(rows) == 4 and rows["zeroshot", "fast"]["train_seconds"] is None
    trained = [rows["procap", mode] for mode in ("reference", "fast")]
    assert trained[0]["correct"] == trained[1]["correct"] and trained[0]["accuracy"] is not None
    for loss in ("first_loss", "last_loss"):
        assert trained[0][loss] == pytest.approx(trained[1][loss], rel=1e-3)
    assert trained[1]["peak_bytes"]["train"] < trained[0]["peak_bytes"]["train"]
    assert trained[1]["flops"]["step"] < trained[0]["flops"]["step"]
    for row in trained:
        assert not row["extrapolated"] and row["steps_measured"] == row["steps"] > 0


def test_phases_and_rates_are_those_of_the_measured_steps(report):
    for row in (row for row in report["rows"] if row["method"] == "procap"):
        phases = row["phases"]
        model = sum(phases[name] for name in ("forward", "backward", "optimizer"))
        assert 0 < model + phases["data"] <= row["train_seconds"] * 1.01
        assert all(phases[name] > 0 for name in ("load", "data", "evaluation"))
        flops, peak = row["flops"], report["matmul_peak"][row["precision"]]
        train, evaluation = flops["step"] / row["step_seconds"]["median"], flops["image"] * row["encoder_fps"]["median"]
        rates = {"train": train, "eval": evaluation}
        assert row["flops_per_second"] == pytest.approx(rates) and min(rates.values()) > 0
        assert row["share_of_peak"] == pytest.approx({kind: rate / peak for kind, rate in rates.items()})


def test_base_classes_are_trained_and_tested_unless_others_are_chosen(report, runtime):
    assert {(row["class_choice"], row["classes"]) for row in report["rows"]} == {("base", 5)}
    assert "16 shots of base classes" in Path(report["folder"], "runtime.md").read_text()
    every = load_case_data("digits", runtime.data, runtime.results, make_settings(runtime, CPU, classes="all").classes)
    assert len(every.space.classnames) == 10 and len(every.test.images) == 60


def test_sizes_are_measured_in_both_modes(report):
    sizes = {(one["point"]["kind"], one["point"]["classes"]) for one in report["scaling"]}
    assert sizes == {(kind, classes) for kind in ("train", "eval") for classes in (5, 10)}
    for one in report["scaling"]:
        assert one["backbone"] == "tiny" and one["counted"] == one["flops"]["reference"] / one["flops"]["fast"] > 1
        assert one["ratio"] > 0 and one["reached"] == one["ratio"] / one["counted"]


def test_a_report_is_written(report, runtime):
    folder = Path(report["folder"])
    assert folder.is_relative_to(runtime.results / "runtime")
    names = {path.name for path in folder.iterdir()}
    assert {"runtime.md", "runtime.csv", "runtime.tex", "runtime.json"} <= names
    assert json.loads((folder / "runtime.json").read_text())["rows"] == report["rows"]
    with (folder / "runtime.csv").open() as file:
        assert [line["source"] for line in csv.DictReader(file)] == ["ours"] * 4
    text = (folder / "runtime.md").read_text()
    assert "EXTRAPOLATED" not in text
    assert "Accelerations of fast mode: images (`--accelerate`); of reference mode: none." in text


def test_each_method_and_mode_is_an_mlflow_run_with_its_metrics(report, runtime):
    from runner.tracking.store import TrackingStore

    runs = list(TrackingStore.choose(runtime.results).open().search("tags.`procap.benchmark` = 'runtime'"))
    logged = {(run.data.params["method"], run.data.params["mode"]): run for run in runs}
    assert len(runs) == len(logged) == len(report["rows"])
    for row in report["rows"]:
        run = logged[row["method"], row["mode"]]
        metrics = run.data.metrics
        assert run.info.status == "FINISHED" and metrics["end_to_end_fps/median"] == row["end_to_end_fps"]["median"]
        assert metrics.get("train_seconds") == row["train_seconds"] and metrics["accuracy"] == row["accuracy"]


def check(capsys, monkeypatch, runtime, report, **ratios: float) -> tuple[int, dict[str, str]]:
    """Run `--check` on a CPU, with the given report; returns the exit code and the states of the targets by name."""
    sizes = tuple((kind, 5, 2, ratio) for kind, ratio in ratios.items())
    monkeypatch.setattr("benchmarks.runtime.speed_targets.CPU_RATIOS", sizes)
    monkeypatch.setattr("benchmarks.runtime.speed_targets.FULL", "tiny")
    monkeypatch.setattr("benchmarks.runtime.speed_targets.SAME_FPS", 0.0)
    monkeypatch.setattr("benchmarks.runtime.benchmark.measure", lambda *_, **__: dict(report))
    words = ("--data", runtime.data, "--results", runtime.results, "--device", "cpu", "--tracking", "off", "--check")
    capsys.readouterr()
    code = main(["bench", "runtime", *map(str, words)])
    listed = {target.what: target.state for target in list_targets(report)}
    out = capsys.readouterr().out
    assert all(name in out and state in out for name, state in listed.items())
    return code, listed


def test_check_exits_with_4_if_a_target_is_not_met(capsys, monkeypatch, runtime, report):
    assert check(capsys, monkeypatch, runtime, report, train=0.01, eval=0.01)[0] == 0
    code, states = check(capsys, monkeypatch, runtime, report, train=0.01, eval=1e6)
    assert code == 4 and [state for what, state in states.items() if "training step" in what] == ["met"]
    assert [state for what, state in states.items() if "evaluation, 5 classes" in what] == ["NOT MET"]
    assert [state for what, state in states.items() if "peak memory of the step" in what] == ["met"]


def make_report(backbone: str, device: str, precision: str, **speeds: tuple[float, float]):
    """A report with images/s and step seconds by method, in fast mode, of whole trainings of `photographs-102`."""
    rows = [
        {"dataset": "photographs-102", "mode": mode, "precision": precision, "method": method, "extrapolated": False,
         "train_seconds": 3.5, "flops": {"step": 1.0, "image": 1.0}, "encoder_fps": {"median": fps},
         "step_seconds": {"median": step}, "peak_bytes": {"train": 1}}
        for method, (fps, step) in speeds.items() for mode in ("reference", "fast")
    ]  # fmt: skip
    kind = "cpu" if device == "CPU" else "cuda"
    return {"rows": rows, "scaling": [], "device": {"type": kind, "name": device}, "backbone": {"name": backbone}}


def test_methods_are_compared_in_fast_mode_of_the_full_model_only():
    speeds = {"zeroshot": (100.0, 1.0), "maple": (100.0, 1.0), "procap": (98.0, 1.2)}
    states = {one.what: one.state for one in list_targets(make_report("ViT-B-16", "CPU", "fp32", **speeds))}
    where = "photographs-102 fp32"
    assert {states[f"FPS of the encoder, ProCAP over {x}, {where}"] for x in ("zero-shot", "MaPLe-style")} == {"met"}
    assert states[f"step, ProCAP over MaPLe-style, {where}"] == "NOT MET"
    others = [one.what for one in list_targets(make_report("mini", "CPU", "fp32", **speeds))]
    assert not [what for what in others if "ProCAP over" in what]


def test_targets_of_an_h200_are_judged_there_only_and_need_a_whole_training():
    report = make_report("ViT-B-16", "NVIDIA H200", "bf16", procap=(8000.0, 1.0))
    speed, seconds = (target for target in list_targets(report) if target.what.startswith("H200"))
    assert (speed.state, seconds.state) == ("NOT MET", "met")
    for row in report["rows"]:
        row["extrapolated"] = True
    seconds = list_targets(report)[-1]
    assert seconds.state == "not measured"
    assert not [target for target in list_targets(report) if target.what.startswith("CPU")]
    on_cpu = list_targets(make_report("ViT-B-16", "CPU", "bf16", procap=(1.0, 1.0)))
    assert not [target for target in on_cpu if target.what.startswith("H200")]
    assert sum(target.what.startswith("CPU, ViT-B/16") for target in on_cpu) == len(CPU_RATIOS)


class MeasuringBegan(Exception):
    """A measurement was begun."""


def test_a_measurement_is_repeated_unless_the_same_exists_from_such_a_machine(suite, monkeypatch, capsys):
    def begin(*_, **__):
        raise MeasuringBegan

    done, place = suite
    monkeypatch.setattr("benchmarks.runtime.benchmark.measure", begin)
    measure_suite(done, place, False)
    assert "measured already" in capsys.readouterr().err
    with pytest.raises(MeasuringBegan):
        measure_suite(done, place, True)
    (file,) = (done.results / "runtime").glob("*/runtime.json")
    whole = file.read_text()
    known = json.loads(whole)
    other_cpu = {**known["environment"], "cpu": {**known["environment"]["cpu"], "name": "another"}}
    others = [{"failed": {"sizes": "no room"}, "rows": []}, {"schema": 2}, {"environment": other_cpu},
              {"device": {**known["device"], "name": "NVIDIA H200"}}, {"settings": {}}]  # fmt: skip
    for text in (*(json.dumps({**known, **other}) for other in others), whole[:-9], "[]", '{"schema": 3}'):
        file.write_text(text)
        with pytest.raises(MeasuringBegan):
            measure_suite(done, place, False)


def test_another_measurement_leaves_the_one_of_the_suite(suite):
    done, place = suite
    (file,) = (done.results / "runtime").glob("*/runtime.json")
    report = json.loads(file.read_text())
    file.unlink()
    other = {**report, "rows": [{**row, "dataset": "tiles"} for row in report["rows"]]}
    for name, found in (("digits", report), ("tiles", other)) * 2:
        write(found, make_settings(place, CPU, datasets=name), place)
    assert len([*(done.results / "runtime").glob("*/runtime.json")]) == 2 and runtime_tables(done)


@pytest.mark.parametrize("changes", [
    {"accuracy": 101.0}, {"train_seconds": -1.0}, {"encoder_fps": {"median": float("nan")}}, {"steps": True},
    {"end_to_end_fps": {"median": -1.0}}, {"title": None}, {"extrapolated": "no"},
])  # fmt: skip
def test_a_report_with_numbers_that_cannot_be_right_is_refused(suite, changes):
    done, _ = suite
    (file,) = (done.results / "runtime").glob("*/runtime.json")
    report = json.loads(file.read_text())
    file.write_text(json.dumps({**report, "rows": [report["rows"][0] | changes]}))
    with pytest.raises(UserError, match=f"{file} cannot be read"):
        runtime_tables(done)


def test_extrapolated_seconds_have_a_column_of_their_own_and_are_never_the_best(suite):
    done, _ = suite
    done = replace(done, options=replace(done.options, methods=("maple", "procap")))
    (file,) = (done.results / "runtime").glob("*/runtime.json")
    report = json.loads(file.read_text())
    own = [{**row, "train_seconds": 5.0} for row in report["rows"] if row["method"] == "procap"]
    report["rows"] = own + [{**row, "method": "maple", "title": "MaPLe", "train_seconds": 9.0} for row in own]

    def tables(whole=()):
        rows = [{**row, "extrapolated": (row["method"], row["mode"]) not in whole} for row in report["rows"]]
        write_json(file, {**report, "rows": rows})
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


ABSENT = {"ray", "mlflow", "deepspeed", "matplotlib"}


class AbsentPackages:
    """An import finder to which some packages are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ABSENT:
            raise ModuleNotFoundError(name)


def benchmark_without_optional_packages(data: str, results: str) -> None:
    """Run the command with random weights in a process that has none of the packages imported."""
    assert not ABSENT & sys.modules.keys()
    sys.meta_path.insert(0, AbsentPackages())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    words = "--datasets digits --methods mmrl --pretrained random --budget 0.01 --scaling 10x2 --json --device cpu"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchmarks.runtime.measure.PEAK_SECONDS", 0.01)
        patched.setattr("benchmarks.runtime.settings.Settings", partial(Settings, batch=4))
        patched.setattr("benchmarks.runtime.workload.count_flops", partial(count_flops, compute=True))
        code = main(["bench", "runtime", *words.split(), "--data", data, "--results", results])
    if code:
        sys.exit(code)


def test_without_time_each_row_has_one_step_and_is_marked_also_where_ray_and_mlflow_are_missing(few_digits, tmp_path):
    """Any method can be measured. The time of one step is marked; random weights have no accuracy."""
    [done] = run_ranks(1, benchmark_without_optional_packages, str(few_digits), str(tmp_path))
    assert done.code == 0, done.err
    assert "tracking: MLflow cannot be imported" in done.err
    report = json.loads(done.out.splitlines()[-1])
    for row in report["rows"]:
        assert row["extrapolated"] and row["steps_measured"] == 1 < row["steps"] and row["train_seconds"] > 0
        assert row["accuracy"] is None and row["accuracy_note"] == "the weights are random"
    assert report["scaling"] == [] and report["settings"]["pretrained"] == "random"
    assert "≈ EXTRAPOLATED" in done.out and f"1 of {row['steps']}" in done.out
    assert "MMRL" in done.out and "random weights" in done.out


@pytest.mark.parametrize(("flags", "message"), [
    (("--precision", "fp8"), "fp32, bf16"),
    (("--methods", "mapel"), "maple"),
    (("--classes", "novel"), "base, all"),
    (("--budget", "nan"), "--budget nan"),
    (("--budget", "-5"), "--budget -5"),
    (("--scaling", "0x4"), "--scaling 0x4"),
    (("--scaling", "10x0"), "--scaling 10x0"),
])  # fmt: skip
def test_wrong_flags_are_answered_in_one_line(capsys, flags, message):
    assert main(["bench", "runtime", *flags]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("procap: ")]
    assert message in line


def test_photographs_have_the_size_of_their_name(tmp_path):
    data = load_case_data("photographs-3", tmp_path / "data", tmp_path / "made")
    assert (len(data.fewshot.train), len(data.test.images), len(data.space.classnames)) == (48, 12, 3)
    assert data.classes == "all", "as many as the name says, also where base classes are chosen"
    assert data.synthetic and data.fewshot.train.image(0).size in ((500, 375), (375, 500))


def test_class_names_are_distinct_and_of_different_lengths():
    names = class_names(1000)
    assert len(set(names)) == 1000 and len({len(name.split()) for name in names[:50]}) > 1
    assert class_names(10) == names[:10]
