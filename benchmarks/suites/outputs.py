"""Write the outputs of a suite: further results, tables and plots, and metrics for MLflow.

Tables and plots of earlier options are removed, as they would look current. Files are recognized by marks that this
program writes into them; other files in the folder are kept.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.console.output import note
from benchmarks.console.packing import ensure_packed
from benchmarks.plots.style import FORMATS, MAKER
from benchmarks.results.metrics import average
from benchmarks.results.published.tables import AVERAGE
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions, Variant
from benchmarks.suites.suite import Suite
from benchmarks.tables.render import SUFFIXES, write_tables
from benchmarks.tables.table import Table
from procap.errors import UserError
from runner.config import RuntimeConfig, Target
from runner.stop_signals import Interrupted
from shards.errors import DataError

PNG_HEAD = 1000
"""Bytes of a PNG that hold the name of the program that made it."""


@dataclass(frozen=True)
class SuiteOutputs:
    """The tables of a suite and the metrics of its collection.

    folder: of its tables, plots and further results. failed: why a part could not be made, empty without failures.
    unreadable: the errors of results that could not be read, by run.
    """

    suite: Suite
    folder: Path
    tables: tuple[Table, ...]
    metrics: Mapping[str, float]
    failed: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict)


def make_outputs(
    suite: Suite, options: SuiteOptions, runtime: RuntimeConfig, *, force: bool = False, verbose: bool = False
) -> SuiteOutputs:
    """Write the suite's tables and plots into its folder below the results.

    A result that is missing or unreadable is a dash in a table and is not plotted. A failing part does not prevent the
    others.
    """
    done = SuiteResults.read(suite, options, runtime.results)
    folder = done.folder
    failed: list[str] = []
    tables: list[Table] = []

    def finish() -> None:
        if suite.finish:
            ensure_packed(dict.fromkeys(run.dataset for run in done.runs), runtime.data)
            suite.finish(done, runtime, force)

    def tabulate() -> None:
        tables.extend(suite.tables(done))
        write_tables(tables, folder)
        remove_other_tables(done, tables)

    def plot() -> None:
        drawn: list[Path] = []
        if suite.plots and not done.frame.empty:
            from benchmarks.plots.style import save_plots

            try:
                drawn = save_plots(folder, suite.plots(done))
            except ImportError:
                note("plots are left out: matplotlib is not installed")
        remove_other_plots(done, drawn)

    for part in (finish, tabulate, plot):
        try:
            part()
        except Interrupted:
            raise
        except (UserError, DataError, OSError) as error:
            failed.append(str(error))
        except Exception as error:
            if verbose:
                traceback.print_exc()
            failed.append(f"internal error: {type(error).__name__}: {error}")
    return SuiteOutputs(suite, folder, tuple(tables), metrics_of(done), "; ".join(failed), done.unreadable)


def metrics_of(done: SuiteResults) -> dict[str, float]:
    """Average each variant over the data sets, as `hm/maple`, `all/procap n_ctx 8`; incomplete ones are left out."""
    metrics: dict[str, float] = {}
    for variant, name in zip(done.variants, short_names(done.variants), strict=True):
        if done.suite.classes == "all":
            means = {
                "all": average([done.metric(variant, dataset, Target(dataset)) for dataset in done.options.datasets])
            }
        else:
            means = dict(zip(("base", "novel", "hm"), done.halves(variant, AVERAGE), strict=True))
        metrics |= {f"{kind}/{name}": metric.mean for kind, metric in means.items() if metric is not None}
    return metrics


def short_names(variants: Sequence[Variant]) -> list[str]:
    """Name each variant by its method, and what varies if the method has several, in characters MLflow allows."""
    methods = [variant.method for variant in variants]
    names = []
    for variant in variants:
        words = [variant.method]
        if methods.count(variant.method) > 1:
            words += [f"{name} {value}" for name, value in variant.key.items()]
        names.append(re.sub(r"[^\w .:/-]", "_", " ".join(words)))
    return names


def remove_other_tables(done: SuiteResults, tables: Iterable[Table]) -> list[Path]:
    """Remove the files of tables in the suite's folder that are not among `tables`; returns them."""
    names = {table.name for table in tables}
    files = [file for file in done.folder.glob("*.json") if file.stem not in names and _is_table(file)]
    # The JSON file identifies the others, so it is removed last.
    return _remove(files, sorted(SUFFIXES.values(), key=lambda suffix: suffix == "json"))


def remove_other_plots(done: SuiteResults, drawn: Iterable[Path]) -> list[Path]:
    """Remove plots in the suite's folder that are neither `drawn` nor a recorded picture; returns them."""
    names = {file.stem for file in drawn} | set(done.pictures.get("pictures", ()))
    others = [file for file in done.folder.glob("*.png") if file.stem not in names]
    files = [file for file in others if MAKER.encode() in file.read_bytes()[:PNG_HEAD]]
    return _remove(files, sorted(FORMATS, key=lambda suffix: suffix == "png"))


def _remove(files: Iterable[Path], suffixes: Iterable[str]) -> list[Path]:
    written = [file.with_name(f"{file.stem}.{suffix}") for file in sorted(files) for suffix in suffixes]
    existing = [file for file in written if file.exists()]
    for file in existing:
        file.unlink()
    return existing


def _is_table(file: Path) -> bool:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    keys = {"labels", "columns", "rows"}
    return isinstance(document, dict) and document.get("name") == file.stem and keys <= document.keys()
