"""Whole runs of ProCAP as a user starts them: one, several at once on one device, the same one again and killed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config import RuntimeConfig
from runner.run_folders import find_runs


def start(
    task: str, runtime: RuntimeConfig, results: Path, dataset: str, choices: Mapping[str, str], *words: str
) -> subprocess.Popen[bytes]:
    """Start `procap train` or `procap eval` of ProCAP in a new process."""
    flags = {"methods": "procap", "datasets": dataset, "data": str(runtime.data), "results": str(results)}
    flags |= {"device": runtime.device, "tracking": "off", "recipe": "procap"} | {k: v for k, v in choices.items() if v}
    listed = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.cli", task, *listed, *words], stdout=subprocess.DEVNULL)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait at most four minutes for a process; RuntimeError if it fails."""
    try:
        if code := process.wait(240):
            raise RuntimeError(f"exit code {code}: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
    finally:
        process.kill()


def run_whole(runtime: RuntimeConfig, dataset: str, choices: Mapping[str, str], epochs: int) -> dict[str, Any]:
    """Train on base classes and evaluate on both halves, each in a process; `start`: seconds without training."""
    results = _empty(runtime, "whole")
    began = time.perf_counter()
    finish(start("train", runtime, results, dataset, choices, "--epochs", str(epochs)))
    train_seconds = time.perf_counter() - began
    finish(start("eval", runtime, results, dataset, choices, "--epochs", str(epochs)))
    [folder] = find_runs(results)
    trained = folder.read_training()
    return {
        "train_seconds": train_seconds, "eval_seconds": time.perf_counter() - began - train_seconds,
        "steps": trained.steps, "start_seconds": train_seconds - trained.seconds,
        "test_images": sum(result.total for result in folder.read_evaluations()), "phases": trained.phases,
    }  # fmt: skip


def run_at_once(
    runtime: RuntimeConfig, dataset: str, choices: Mapping[str, str], count: int, epochs: int
) -> dict[str, Any]:
    """Train `count` seeds at the same time, each in a process."""
    results = _empty(runtime, f"{count}-at-once")
    began = time.perf_counter()
    seeds = [("--epochs", str(epochs), "--seeds", str(seed + 1)) for seed in range(count)]
    for process in [start("train", runtime, results, dataset, choices, *words) for words in seeds]:
        finish(process)
    seconds = time.perf_counter() - began
    trained = [result for folder in find_runs(results) if (result := folder.read_training())]
    return {
        "seconds": seconds, "runs_per_hour": 3600 * count / seconds,
        "images_per_second": sum(result.images_per_second or 0.0 for result in trained),
    }  # fmt: skip


def compare_repeated(runtime: RuntimeConfig, dataset: str, choices: Mapping[str, str], epochs: int) -> dict[str, Any]:
    """Compare checkpoints of a deterministic run, of the same again, and of one that is stopped halfway and resumes."""
    digests, resumed, middle = {}, 0, 0.0
    for name in ("first", "second", "killed"):
        results = _empty(runtime, name)
        words = (dataset, choices, "--epochs", str(epochs), "--deterministic")
        process = start("train", runtime, results, *words)
        if name == "killed":
            while process.poll() is None and not any(results.rglob("config.json")):
                time.sleep(0.01)
            time.sleep(middle)
            process.terminate()
            process.wait()
            process = start("train", runtime, results, *words)
        finish(process)
        [folder] = find_runs(results)
        trained = folder.read_training()
        middle = trained.phases.get("compile", 0.0) + trained.seconds / 2
        resumed, digests[name] = trained.resumed, hashlib.sha256(folder.checkpoint_file.read_bytes()).hexdigest()
    if not resumed:
        raise RuntimeError("the run ended before it had a state to go on from: give more epochs")
    return {"equal": len({*digests.values()}) == 1, "resumed": resumed, "sha256": digests}


def _empty(runtime: RuntimeConfig, name: str) -> Path:
    """Return a folder below the results without earlier runs."""
    shutil.rmtree(runtime.results / name, ignore_errors=True)
    return runtime.results / name
