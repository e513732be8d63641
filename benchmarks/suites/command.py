"""The command line that goes on with a suite as it was chosen: what has finished is kept."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.runtime.settings import QUICK_BUDGET, Flags, flags_of_choice
from benchmarks.suites.suite import Suite, SuiteOptions
from shards.home import data_root


def suite_command(suite: Suite, options: SuiteOptions, results: str | Path) -> str:
    """As it is typed."""
    typed = suite.typed or suite.name
    words = ["procap", "bench", typed, *(_measured_apart(options) if typed == "runtime" else _chosen(suite, options))]
    words += ["--data", str(options.data)] if options.data and options.data != data_root("") else []
    return shlex.join([*words, "--results", str(results)])


def _measured_apart(options: SuiteOptions) -> list[str]:
    """The flags of the contest, which has a command of its own and no runs."""
    flags = vars(flags_of_choice(options, QUICK_BUDGET if options.quick else None))
    words: list[str] = []
    for name, value in flags.items():
        said = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--{name}", said] if value != getattr(Flags(), name) else []
    return words


def _chosen(suite: Suite, options: SuiteOptions) -> list[str]:
    own = suite.options(options.profile, quick=options.quick, data=options.data)
    words = ["--profile", options.profile.name, *(["--quick"] if options.quick else [])]
    for field in ("datasets", "methods", "seeds", "shots"):
        chosen = getattr(options, field)
        words += [f"--{field}", ",".join(map(str, chosen))] if chosen != getattr(own, field) else []
    for field in ("recipe", "backbone", "pretrained", "precision"):
        words += [f"--{field}", getattr(options, field)] if getattr(options, field) else []
    return words + (["--epochs", str(options.overrides["epochs"])] if "epochs" in options.overrides else [])
