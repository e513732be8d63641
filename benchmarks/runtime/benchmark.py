"""Measure the paper's runtime table: each method in reference and in fast mode, alternately in one process.

Cases of one data set use the same images in the same order, alternate epoch by epoch, and every timed block starts on
an idle device.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import note
from benchmarks.results.frame import digest_of
from benchmarks.runtime.settings import Settings, make_settings
from benchmarks.tables.speed import SCHEMA, choose_settings, load_runtime_reports
from procap.errors import UsageError
from procap.methods import learns_from_features
from runner.provenance import describe_environment, provenance
from runner.results import write_json
from runner.session import Session

if TYPE_CHECKING:
    from benchmarks.results.suite_results import SuiteResults


def measure_suite(results: SuiteResults, session: Session, force: bool) -> None:
    """Measure what the suite `runtime` needs and write it below the results, unless it exists and not `force`."""
    settings = suite_settings(results, session)
    if not force and (folder := _find_measured(settings, session)):
        note(f"runtime: measured already, see {folder}; --force measures again")
        return
    write(measure(settings, session), settings, session)


def suite_settings(results: SuiteResults, session: Session) -> Settings:
    """Make the settings of the measurement from the options of the suite."""
    options = results.options
    if on_features := [name for name in options.methods if learns_from_features(name)]:
        raise UsageError(f"runtime compares steps on images; leave out those on features: {', '.join(on_features)}")
    return make_settings(session, methods=options.methods, datasets=options.datasets, **choose_settings(results))


def _find_measured(settings: Settings, session: Session) -> Path | None:
    # Through JSON, in which tuples are lists, as in the report that was read.
    asked, machine = json.loads(json.dumps(asdict(settings))), describe_environment(session.device)
    for file, report in load_runtime_reports(session.runtime.results):
        is_same = all(report.get("environment", {}).get(part) == machine[part] for part in ("gpu", "cpu"))
        if report.get("settings") == asked and is_same:
            return file.parent
    return None


def measure(settings: Settings, session: Session) -> dict[str, Any]:
    """Measure every method of `settings` on every data set; returns plain JSON."""
    from benchmarks.runtime.case import load_case_data, run_cases
    from benchmarks.runtime.workload import models_by_mode
    from procap.weights.loading import load_clip

    # The mean load of the last minute, before this process adds to it.
    load, began = os.getloadavg()[0], time.perf_counter()
    datasets = [load_case_data(name, session.runtime.data, settings) for name in settings.datasets]
    clip = load_clip(settings.backbone, settings.pretrained).to(session.device)
    models = models_by_mode(clip, settings.accelerations)
    rows = [row for data in datasets for row in run_cases(data, settings, models)]
    return {
        "schema": SCHEMA,
        **provenance(describe_environment(session.device)),
        "command": f"procap {' '.join(sys.argv[1:])}",
        "settings": asdict(settings),
        "backbone": {"name": clip.name, "weights": clip.pretrained},
        "rows": rows,
        "seconds": time.perf_counter() - began,
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
    }


def write(report: dict[str, Any], settings: Settings, session: Session) -> None:
    """Write the measurements below the results."""
    # Only the same measurement replaces another in its folder.
    weights = [] if settings.pretrained is None else [Path(settings.pretrained).stem]
    words = settings.backbone, *weights, *settings.precisions, report["environment"]["gpu"] or "CPU"
    folder = (
        session.runtime.results
        / "runtime"
        / re.sub(r"\W+", "-", "-".join([*words, digest_of(asdict(settings))]).lower(), flags=re.ASCII)
    )
    report["folder"] = str(folder)
    write_json(folder / "runtime.json", report)
    session.remote.push("runtime")
