"""The command line that goes on with a suite as it was chosen: what has finished is kept."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.runtime.settings import QUICK_BUDGET, Flags, flags_of_choice
from benchmarks.suites.suite import Suite, SuiteOptions
from shards.home import data_root


def suite_command(suite: Suite, choice: SuiteOptions, results: str | Path) -> str:
    """As it is typed."""
    typed = suite.typed or suite.name
    words = ["procap", "bench", typed, *(_measured_apart(choice) if typed == "runtime" else _chosen(suite, choice))]
    words += ["--data", str(choice.data)] if choice.data and choice.data != data_root("") else []
    return shlex.join([*words, "--results", str(results)])


def _measured_apart(choice: SuiteOptions) -> list[str]:
    """The flags of the contest, which has a command of its own and no runs."""
    flags = vars(flags_of_choice(choice, QUICK_BUDGET if choice.quick else None))
    words: list[str] = []
    for name, value in flags.items():
        said = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--{name}", said] if value != getattr(Flags(), name) else []
    return words


def _chosen(suite: Suite, choice: SuiteOptions) -> list[str]:
    own = suite.choice(choice.world, quick=choice.quick, data=choice.data)
    words = ["--world", choice.world.name, *(["--quick"] if choice.quick else [])]
    for field in ("datasets", "methods", "seeds", "shots"):
        chosen = getattr(choice, field)
        words += [f"--{field}", ",".join(map(str, chosen))] if chosen != getattr(own, field) else []
    for field in ("recipe", "backbone", "pretrained", "precision"):
        words += [f"--{field}", getattr(choice, field)] if getattr(choice, field) else []
    return words + (["--epochs", str(choice.overrides["epochs"])] if "epochs" in choice.overrides else [])
