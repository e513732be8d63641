"""The demo: one command from nothing to tables and figures, and again to nothing more to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from started import started

from benchmarks.cli import main
from benchmarks.cli.demo import FULL, METHODS, demo_configs

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["demo", "--quick", "--limit", "16"]
PROGRAM = (
    "import signal, sys; from benchmarks.cli import main;"
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
)
"""Ctrl-C counts also where the tests run in the background of a shell, which ignores it."""
COMMAND = [sys.executable, "-c", PROGRAM, *QUICK, "--tracking", "off", "--out"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
FIGURES = {"hm-bars", "learning-curves", "accuracy-speed"}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.json"))}


def accuracies(out: Path) -> list[tuple]:
    """Base, novel and HM; what follows are speeds."""
    table = json.loads((out / "table.json").read_text())
    return [(line["labels"], line["items"][:3]) for line in table["lines"]]


def test_quick_demo_makes_everything_it_names_and_repeats_nothing(tmp_path, capsys):
    out = tmp_path / "demo"
    assert main([*QUICK, "--out", str(out), "--tracking", "off", "--json"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    [sheet] = document["sheets"]
    named = [column["title"] for column in sheet["columns"]].index("Method name")
    assert {line["items"][named] for line in sheet["lines"]} == set(METHODS)
    text = "\n".join(shown)
    assert "†" in text and "not the published recipes" in text
    for command in ("procap table --results", "procap train --methods procap", "procap eval --methods procap"):
        assert command in text
    assert {Path(file).stem for file in document["figures"]} == FIGURES | {"data-digits"}
    for file in document["figures"]:
        with Image.open(file) as picture:
            assert min(picture.size) > 300
        if not Path(file).stem.startswith("data-"):
            assert Path(file).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert [Path(file).name for file in document["tables"]] == ["table.md", "table.csv", "table.tex", "table.json"]
    assert (out / "table.md").read_text().strip() in text and json.loads((out / "table.json").read_text()) == sheet
    for file in document["tables"]:
        assert Path(file).stat().st_size > 100
    results = out / "results"
    before = files(results)
    assert main([*QUICK, "--out", str(out), "--tracking", "off"]) == 0
    assert capsys.readouterr().err.count("already finished") == len(METHODS)
    assert files(results) == before


def test_the_demo_compares_methods_under_one_recipe():
    configs = demo_configs(FULL)
    assert {config.dataset for config in configs} >= {"digits"} and len({config.dataset for config in configs}) >= 3
    trained = [config for config in configs if config.method != "zeroshot"]
    assert len({json.dumps(config.recipe.model_dump(exclude={"lr"})) for config in trained}) == 1
    assert {config.method for config in configs} == set(METHODS)
    assert {(config.classes, config.shots, config.seed) for config in configs} == {("base", 16, 1)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "demo"
    subprocess.run([*COMMAND, str(out)], cwd=ROOT, check=True, env=ONE_THREAD, capture_output=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "sign"),
    [
        (signal.SIGKILL, "data/.digits.partial/set/train"),
        (signal.SIGKILL, "results/base/digits/coop/mini/16shot/*/config.json"),
        (signal.SIGKILL, "results/base/digits/maple/mini/16shot/*/eval"),
        (signal.SIGTERM, "results/base/digits/procap/mini/16shot/*/state/*"),
        (signal.SIGINT, "results/base/digits/maple/mini/16shot/*/config.json"),
    ],
)
def test_stopped_anywhere_the_demo_goes_on_and_ends_the_same(tmp_path, undisturbed, stop, sign):
    out = tmp_path / "demo"
    command = [*COMMAND, str(out)]
    deadline = time.monotonic() + 600
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(command, cwd=ROOT, env=ONE_THREAD, **silent) as process:
        while not any(out.glob(sign)):
            assert process.poll() is None and time.monotonic() < deadline, f"the demo ended before {sign} was seen"
            time.sleep(0.01)
        process.send_signal(stop)
        assert process.wait(timeout=300) in (-stop, 128 + stop)
    done = {path: path.read_bytes() for path in out.rglob("train.json")}
    subprocess.run([*COMMAND, str(out)], cwd=ROOT, check=True, env=ONE_THREAD, capture_output=True)
    assert accuracies(out) == accuracies(undisturbed)
    assert all(path.read_bytes() == content for path, content in done.items())
    for path in undisturbed.rglob("checkpoint.safetensors"):
        assert (out / path.relative_to(undisturbed)).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_the_demo_records_its_runs_in_mlflow(tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "benchmarks.cli", *QUICK, "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    done = subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True, text=True)
    assert (out / "results" / "mlflow.db").exists() and f"procap ui --results {out / 'results'}" in done.stdout
    status = [sys.executable, "-m", "benchmarks.cli", "track", "status", "--results", str(out / "results")]
    said = subprocess.run(status, cwd=ROOT, check=True, env=environment, capture_output=True, text=True).stdout
    assert said == "everything was sent\n"
