"""The runtime benchmark: modes agree, a report is written once, and wrong ones are refused."""

import json
import os
import platform
import re
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from rank_processes import run_ranks
from tiny_geometry import SHORT_OPTIONS, needed_options

from benchmarks.cli import main
from benchmarks.experiment.profiles import MINI
from benchmarks.results.suite_results import SuiteResults
from benchmarks.runtime.benchmark import measure, measure_suite, suite_settings, write
from benchmarks.runtime.case import load_case_data
from benchmarks.runtime.settings import METHOD_OPTIONS, Settings, make_settings
from benchmarks.suites import load_suite
from procap.errors import UsageError
from runner.acceleration import Acceleration
from runner.config import RuntimeConfig
from runner.provenance import cpu_name, describe_environment
from runner.results import write_json
from runner.session import Session


@pytest.fixture(scope="module")
def runtime(few_digits, tmp_path_factory) -> RuntimeConfig:
    return RuntimeConfig(few_digits, tmp_path_factory.mktemp("results"), device="cpu")


@pytest.fixture(scope="module")
def report(runtime, short_checkpoint):
    """One epoch of ProCAP and zero-shot CLIP; fast mode augments from decoded pixels, as on a GPU."""
    session = Session(runtime)
    settings = make_settings(
        session, methods=("zeroshot", "procap"), backbone=str(short_checkpoint), epochs=1, repeats=1
    )
    settings = replace(settings, accelerations=Acceleration(images=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(METHOD_OPTIONS, "procap", {"depth": 3})
        report = measure(settings, session)
    write(report, settings, session)
    return report


@pytest.fixture
def suite(report, runtime, tmp_path):
    """The suite with the report as its measurement, and its runtime; each test has a copy."""
    definition = load_suite("runtime")
    options = definition.options(MINI, datasets=("digits",), methods=("zeroshot", "procap"))
    place = replace(runtime, results=tmp_path, tracking_uri="off")
    done = SuiteResults.read(definition, options, tmp_path)
    settings = json.loads(json.dumps(asdict(suite_settings(done, Session(place)))))
    copy = {**report, "settings": settings, "backbone": {"name": "mini", "weights": ""}}
    write_json(tmp_path / "runtime" / "x" / "runtime.json", copy)
    return done, place


def test_whole_trainings_of_both_modes_agree(report):
    """Both modes start from the same weights and use the same images."""
    rows = {(row["method"], row["mode"]): row for row in report["rows"]}
    assert len(rows) == 4 and rows["zeroshot", "fast"]["train_seconds"] is None
    trained = [rows["procap", mode] for mode in ("reference", "fast")]
    assert trained[0]["correct"] == trained[1]["correct"] and trained[0]["accuracy"] is not None
    assert trained[0]["last_loss"] == pytest.approx(trained[1]["last_loss"], rel=1e-3)
    assert trained[1]["peak_bytes"]["train"] < trained[0]["peak_bytes"]["train"]
    assert trained[1]["flops"]["step"] < trained[0]["flops"]["step"]
    for row in trained:
        assert 0 < row["steps"] * row["step_seconds"]["median"] <= row["train_seconds"] * 1.01


def test_methods_of_several_views_and_of_a_teacher_are_measured_beside_others(runtime, short_checkpoint):
    session, methods = Session(runtime), ("coprompt", "procap", "promptkd")
    options = {name: SHORT_OPTIONS.get(name, {}) | needed_options(name, short_checkpoint) for name in methods}
    options["coprompt"] |= METHOD_OPTIONS["coprompt"]
    chosen = {"backbone": str(short_checkpoint), "epochs": 1, "repeats": 1, "classes": "base"}
    report = measure(make_settings(session, methods=methods, options=options, **chosen), session)
    last = {(row["method"], row["mode"]): row["last_loss"] for row in report["rows"]}
    for method in methods:
        assert last[method, "reference"] == pytest.approx(last[method, "fast"], rel=1e-3)


@pytest.mark.parametrize(("method", "why"), [("tpt", "sees several views"), ("rebapl", "takes different steps from")])
def test_methods_whose_speed_would_be_that_of_another_one_are_refused(runtime, method, why):
    with pytest.raises(UsageError, match=f"{method} {why}"):
        make_settings(Session(runtime), methods=(method,))


def test_base_classes_are_trained_and_tested_unless_others_are_chosen(report, runtime):
    assert {row["classes"] for row in report["rows"]} == {5}
    whole = load_case_data("digits", runtime.data, make_settings(Session(runtime), classes="all"))
    assert len(whole.space.classnames) == 10 and len(whole.test.images) == 60


def test_a_report_is_written(report, runtime):
    folder = Path(report["folder"])
    assert folder.is_relative_to(runtime.results / "runtime")
    assert json.loads((folder / "runtime.json").read_text())["rows"] == report["rows"]


def test_the_name_of_a_cpu_is_its_model_and_without_one_its_architecture(monkeypatch):
    models = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text()) or [platform.processor()]
    assert describe_environment()["cpu"]["name"] == (models[0] or platform.machine())
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor: 0")
    assert cpu_name.__wrapped__() in (platform.processor(), platform.machine())


class MeasuringBegan(Exception):
    """A measurement was begun."""


def test_a_measurement_is_repeated_unless_the_same_exists_from_such_a_machine(suite, monkeypatch, capsys):
    def begin(*_, **__):
        raise MeasuringBegan

    done, session = suite[0], Session(suite[1])
    monkeypatch.setattr("benchmarks.runtime.benchmark.measure", begin)
    measure_suite(done, session, False)
    assert "measured already" in capsys.readouterr().err
    with pytest.raises(MeasuringBegan):
        measure_suite(done, session, True)
    (file,) = (done.results / "runtime").glob("*/runtime.json")
    whole = file.read_text()
    known = json.loads(whole)
    other_cpu = {**known["environment"], "cpu": {**known["environment"]["cpu"], "name": "another"}}
    others = [{"schema": 2}, {"environment": other_cpu},
              {"environment": {**known["environment"], "gpu": "NVIDIA H200"}}, {"settings": {}}]  # fmt: skip
    for text in (*(json.dumps({**known, **other}) for other in others), whole[:-9], "[]", '{"schema": 3}'):
        file.write_text(text)
        with pytest.raises(MeasuringBegan):
            measure_suite(done, session, False)


def test_the_table_shows_the_measurement_that_is_asked_for_also_if_a_newer_one_exists(suite):
    done, _ = suite
    [file] = done.results.glob("runtime/*/runtime.json")
    known = json.loads(file.read_text())
    newer = {"shots": 4, "precisions": ["bf16"], "epochs": 2, "pretrained": "random"}
    for name, value in newer.items():
        settings, written = known["settings"] | {name: value}, "2999-01-01T00:00:00Z"
        write_json(done.results / "runtime" / name / "runtime.json", known | {"settings": settings, "written": written})
    [table] = done.make_tables()
    assert " 10 epochs " in table.notes[0] and "16 shots" in table.notes[0] and "fp32" in table.notes[0]
    [table] = replace(done, options=replace(done.options, shots=(4,))).make_tables()
    assert "4 shots" in table.notes[0]


def test_flags_without_effect_on_the_measurement_are_refused_but_for_several_suites(few_digits, tmp_path, capsys):
    """What would be measured and shown under them is not what they ask for."""
    places = ["--profile", "mini", "--dry-run", "--data", str(few_digits), "--results", str(tmp_path)]
    unread = ["--seeds", "2", "--recipe", "published", "--temperature", "shots", "--limit", "9", "--launcher", "ray"]
    for flag, value in zip(unread[::2], unread[1::2], strict=True):
        assert main(["bench", "runtime", flag, value, *places]) == 2
        assert f"runtime takes no {flag}," in capsys.readouterr().err
    for flag, value in zip(unread[:4:2], unread[1:4:2], strict=True):
        assert main(["table", "runtime", flag, value, "--results", str(tmp_path)]) == 2
        assert f"runtime takes no {flag}," in capsys.readouterr().err
    read = ["--shots", "4", "--epochs", "1", "--precision", "bf16", "--methods", "maple", "--datasets", "digits"]
    assert main(["bench", "runtime", *read, *places]) == 0
    assert main(["bench", "all", "--seeds", "2", "--limit", "9", *places]) == 0


ABSENT = {"ray", "mlflow", "deepspeed", "matplotlib"}


class AbsentPackages:
    """An import finder to which some packages are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ABSENT:
            raise ModuleNotFoundError(name)


def benchmark_without_optional_packages(data: str, results: str) -> None:
    """Run the suite with random weights in a process that has none of the packages imported."""
    assert not ABSENT & sys.modules.keys()
    sys.meta_path.insert(0, AbsentPackages())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    words = "--datasets digits --methods mmrl --pretrained random --epochs 1 --device cpu --tracking off"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchmarks.runtime.settings.Settings", partial(Settings, batch=4))
        code = main(["bench", "runtime", *words.split(), "--data", data, "--results", results])
    if code:
        sys.exit(code)


@pytest.mark.slow
def test_any_method_is_measured_also_where_ray_and_mlflow_are_missing(few_digits, tmp_path):
    """Random weights have no accuracy."""
    [done] = run_ranks(1, benchmark_without_optional_packages, str(few_digits), str(tmp_path))
    assert done.code == 0, done.err
    [file] = tmp_path.glob("runtime/*/runtime.json")
    report = json.loads(file.read_text())
    for row in report["rows"]:
        assert row["train_seconds"] > 0 and row["accuracy"] is None and row["accuracy_note"] == "the weights are random"
    assert report["settings"]["pretrained"] == "random"
    assert "MMRL" in done.out and "random weights" in done.out
