"""Runs that a killed attempt had finished are tracked by the next one; the slow tests kill real nodes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cli import main
from benchmarks.studies.chaos.fault_cluster import count_tracked, load_outcomes


def test_runs_that_a_killed_attempt_had_not_tracked_are_in_mlflow_after_the_next(
    few_digits: Path, short_checkpoint: Path, tmp_path: Path
) -> None:
    words = ["bench", "base-to-novel", "--profile", "paper", "--datasets", "digits", "--methods", "zeroshot"]
    words += ["--seeds", "1,2", "--backbone", str(short_checkpoint), "--data", str(few_digits), "--max-concurrent", "1"]
    words += ["--results", str(tmp_path)]
    assert main([*words, "--tracking", "off"]) == 0
    assert main(words) == 0
    runs, parents = count_tracked(tmp_path)
    assert runs == dict.fromkeys(load_outcomes(tmp_path), 1) and runs and parents == ["FINISHED"]
