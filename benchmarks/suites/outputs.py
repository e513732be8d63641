"""Write the outputs of a suite: further results, tables and plots, and metrics for MLflow."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.console.output import note_trace
from benchmarks.console.packing_progress import pack_missing_with_progress
from benchmarks.experiment.suite import Suite, SuiteOptions
from benchmarks.plots.style import FORMATS, save_plots
from benchmarks.results.suite_results import SuiteResults, write_plan
from benchmarks.tables.render import SUFFIXES, write_tables
from benchmarks.tables.summary import find_hm, rank_rows
from benchmarks.tables.table import Table
from runner.results import describe_failure, write_json
from runner.run_collection import COLLECTIONS
from runner.session import Session
from runner.stop_signals import Interrupted
from shards.files import read_regular

OUTPUTS = "outputs.json"
"""The names of the current tables and plots in the folder of a suite."""
MISSING = "its results were not found: is --results on storage that all nodes share?"


@dataclass(frozen=True)
class SuiteOutputs:
    """The tables and metrics of a suite. failed: why a part could not be made. failed_runs: errors by run."""

    suite: Suite
    folder: Path
    tables: tuple[Table, ...]
    metrics: Mapping[str, float]
    failed: str = ""
    failed_runs: Mapping[str, str] = field(default_factory=dict)


def make_outputs(suite: Suite, options: SuiteOptions, session: Session, *, force: bool = False) -> SuiteOutputs:
    """Write the suite's tables and plots into its folder below the results."""
    runtime = session.runtime
    write_plan(runtime.results / COLLECTIONS / "suite" / suite.name, options, suite.plan(options))
    done = SuiteResults.read(suite, options, runtime.results)
    folder = done.folder
    failed: list[str] = []
    tables: list[Table] = []
    drawn: list[Path] = []
    # Tables show what `finish` makes.
    with _collect_failure(failed):
        if suite.finish:
            pack_missing_with_progress(dict.fromkeys(run.dataset for run in done.runs), runtime.data)
            suite.finish(done, session, force)
    with _collect_failure(failed):
        tables = done.make_tables()
        write_tables(tables, folder)
    with _collect_failure(failed):
        if suite.plots and not done.frame.empty:
            drawn = save_plots(folder, suite.plots(done))
    with _collect_failure(failed):
        pictures = done.pictures.get("pictures", ())
        # Nothing is removed unless all of the new files exist.
        if folder.is_dir() and not failed:
            remove_outdated(folder, [*(table.name for table in tables), *(file.stem for file in drawn), *pictures])
    failed_runs = {**{path: MISSING for path, _ in done.missing}, **done.unreadable}
    return SuiteOutputs(suite, folder, tuple(tables), metrics_of(done, tables), "; ".join(failed), failed_runs)


@contextmanager
def _collect_failure(reasons: list[str]) -> Iterator[None]:
    """Add why the block failed; hours of training end in tables even if a plot fails. Signals are raised."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        note_trace(traceback.format_exc())
        reasons.append(describe_failure(error))


def metrics_of(done: SuiteResults, tables: Sequence[Table]) -> dict[str, float]:
    """Return HM of the tables as `hm/maple`, over the data sets, of each method with one variant and all its results.

    A suite without HMs has `accuracy/maple`, of the methods with one row in the last ranked column of its first table.
    """
    methods = [variant.method for variant in done.variants]
    titles = {variant.method: variant.name for variant in done.variants if methods.count(variant.method) == 1}
    if metrics := {f"hm/{method}": hm.mean for method, title in titles.items() if (hm := find_hm(tables, title))}:
        return metrics
    numbers = rank_rows(tables[0])[1] if tables and not done.frame.empty else {}
    shown = {variant.name: variant.method for variant in done.variants if variant.name in numbers}
    named = [*shown.values()]
    return {f"accuracy/{method}": numbers[name] for name, method in shown.items() if named.count(method) == 1}


def remove_outdated(folder: Path, names: Iterable[str]) -> None:
    """Remove tables and plots of earlier options, which would look current, and record the current ones by name."""
    record, current = folder / OUTPUTS, sorted({*names})
    earlier: list[str] = []
    # Without a readable record nothing is removed.
    with suppress(OSError, ValueError):
        earlier = json.loads(read_regular(record))["outputs"]
    for name in {*earlier} - {*current}:
        for suffix in (*SUFFIXES.values(), *FORMATS):
            (folder / f"{Path(name).name}.{suffix}").unlink(missing_ok=True)
    if current != earlier:
        write_json(record, {"outputs": current})
