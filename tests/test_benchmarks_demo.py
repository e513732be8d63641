"""The demo: one command from nothing to tables and figures, and again to nothing more to do."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_process import start_process

from benchmarks.cli import main
from benchmarks.cli.demo import DATASETS, METHODS

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["demo", "--quick", "--limit", "16"]
PROGRAM = (
    "import signal, sys; from benchmarks.cli import main;"
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
)
"""Ctrl-C counts also where the tests run in the background of a shell, which ignores it."""
COMMAND = [sys.executable, "-c", PROGRAM, *QUICK, "--tracking", "off", "--out"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.json"))}


def accuracies(out: Path) -> list[tuple]:
    table = json.loads((out / "results/collections/suite/base-to-novel/base-to-novel.json").read_text())
    return [(row["labels"], row["cells"][:3]) for row in table["rows"]]


def test_quick_demo_is_a_suite_and_repeats_nothing(tmp_path, capsys):
    out = tmp_path / "demo"
    assert main([*QUICK, "--out", str(out), "--tracking", "off", "--json"]) == 0
    captured = capsys.readouterr()
    *shown, last = captured.out.splitlines()
    document = json.loads(last)
    assert document["suite"] == "base-to-novel" and not document["failed"]
    titles = [row["labels"][-1] for row in document["tables"][0]["rows"]]
    assert titles == ["CLIP (zero-shot)", "CoOp", "MaPLe", "ProCAP"]
    text = "\n".join(shown)
    assert "†" in text and "not the published recipes" in text
    results = out / "results"
    assert f"procap table base-to-novel --data {out / 'data'} --results {results}" in captured.err
    made = results / "collections/suite/base-to-novel"
    assert {"base-to-novel.md", "base-to-novel.csv", "hm-bars.png", "hm-bars.pdf"} <= {f.name for f in made.iterdir()}
    before = files(results)
    assert main([*QUICK, "--out", str(out), "--tracking", "off"]) == 0
    assert "4 runs, 4 done already" in capsys.readouterr().err
    trained = {name for name in before if name.endswith("train.json") or "/eval/" in name}
    assert len(trained) == 12 and all(files(results)[name] == before[name] for name in trained)


def test_the_demo_compares_methods_under_one_recipe(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--dry-run", "--json"]) == 0
    runs = [run["run"] for run in json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]]
    names = {(dataset, method) for _, dataset, method, *_ in (run.split("/") for run in runs)}
    assert names == set(itertools.product(DATASETS, METHODS)) and len(runs) == len(names)
    # These configurations gave the accuracies in the README.
    assert "base/shapes/coop/mini/16shot/seed1-255e8c03" in runs
    assert "base/shapes/procap/mini/16shot/seed1-d0e2b38a" in runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "demo"
    subprocess.run([*COMMAND, str(out)], cwd=ROOT, check=True, env=ONE_THREAD, capture_output=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "sign"), [
    (signal.SIGKILL, "data/.digits.partial/set/train"),
    (signal.SIGKILL, "results/base/digits/coop/mini/16shot/*/config.json"),
    (signal.SIGKILL, "results/base/digits/maple/mini/16shot/*/eval"),
    (signal.SIGTERM, "results/base/digits/procap/mini/16shot/*/state/*"),
    (signal.SIGINT, "results/base/digits/maple/mini/16shot/*/config.json"),
])  # fmt: skip
def test_stopped_anywhere_the_demo_goes_on_and_ends_the_same(tmp_path, undisturbed, stop, sign):
    out = tmp_path / "demo"
    command = [*COMMAND, str(out)]
    deadline = time.monotonic() + 600
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with start_process(command, cwd=ROOT, env=ONE_THREAD, **silent) as process:
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
    command = [sys.executable, "-m", "benchmarks.cli"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    subprocess.run([*command, *QUICK, "--out", str(out)], cwd=ROOT, check=True, env=environment, capture_output=True)
    assert (out / "results" / "mlflow.db").exists()
    sync = [*command, "track", "sync", "--results", str(out / "results")]
    printed = subprocess.run(sync, cwd=ROOT, check=True, env=environment, capture_output=True, text=True).stdout
    assert printed.startswith("0 runs sent to")
