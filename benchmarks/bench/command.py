"""The command line that goes on with a suite as it was chosen: what has finished is kept."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.suites.suite import Choice, Suite
from shards.home import data_root


def suite_command(suite: Suite, choice: Choice, results: str | Path) -> str:
    """As it is typed."""
    words = ["procap", "bench", suite.typed or suite.name]
    if not any(suite.arms(choice, method) for method in choice.methods):
        # Measured apart from all runs, by a command with flags of its own.
        named = ("--methods", ",".join(choice.methods), "--datasets", ",".join(choice.datasets))
        return shlex.join([*words, *named, "--results", str(results)])
    own = suite.choice(choice.world, quick=choice.quick, data=choice.data)
    words += ["--world", choice.world.name, *(["--quick"] if choice.quick else [])]
    for field in ("datasets", "methods", "seeds", "shots"):
        chosen = getattr(choice, field)
        words += [f"--{field}", ",".join(map(str, chosen))] if chosen != getattr(own, field) else []
    for field in ("recipe", "backbone", "pretrained", "precision"):
        words += [f"--{field}", getattr(choice, field)] if getattr(choice, field) else []
    words += ["--epochs", str(choice.overrides["epochs"])] if "epochs" in choice.overrides else []
    words += ["--data", str(choice.data)] if choice.data and choice.data != data_root("") else []
    return shlex.join([*words, "--results", str(results)])
