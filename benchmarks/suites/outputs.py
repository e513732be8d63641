"""What is made of a suite when its runs are done: its further results, its tables and its figures, as files."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from benchmarks.cli.data import ensure_packed
from benchmarks.console.output import note
from benchmarks.results.pictures import folder_of
from benchmarks.results.scores import Cell, average
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import SuiteOptions, Variant
from benchmarks.suites.cleanup import remove_other_figures, remove_other_sheets
from benchmarks.suites.suite import Suite
from benchmarks.tables.formats import write_sheets
from benchmarks.tables.table import Sheet
from procap.errors import UserError
from runner.config import RuntimeConfig, Target
from runner.stop_signals import Interrupted
from shards.errors import DataError


@dataclass(frozen=True)
class Made:
    """The tables of a suite, the figures of its collection, and why something could not be made; empty: it could.

    folder: where its tables, figures and further results lie. unreadable: why, by run, where results could not be read.
    """

    suite: Suite
    folder: Path
    sheets: tuple[Sheet, ...]
    figures: Mapping[str, float]
    failed: str = ""
    unreadable: Mapping[str, str] = field(default_factory=dict)


def make(suite: Suite, options: SuiteOptions, at: RuntimeConfig, *, force: bool = False, verbose: bool = False) -> Made:
    """Finish, tabulate and draw, into the suite's folder below the results.

    What is missing, or cannot be read, is a dash in a table and is not drawn.
    """
    done = SuiteResults.read(suite, options, at.results)
    folder = folder_of(done)
    mishaps = Mishaps(verbose)
    if suite.finish:
        with mishaps:
            # Where all runs are done, nobody has looked for their data yet.
            ensure_packed(dict.fromkeys(entry.dataset for entry in done.runs), at.data)
            suite.finish(done, at, force)
    sheets: list[Sheet] = []
    with mishaps:
        sheets = suite.sheets(done)
        write_sheets(sheets, folder)
        remove_other_sheets(done, sheets)
    with mishaps:
        remove_other_figures(done, _draw(suite, done, folder))
    return Made(suite, folder, tuple(sheets), figures_of(done), "; ".join(mishaps.said), done.unreadable)


class Mishaps:
    """Keeps for the end what goes wrong in a block: one part of a suite must not take the others with it."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.said: list[str] = []

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, Interrupted):
            return False
        plain = isinstance(error, UserError | DataError | OSError)
        if self.verbose and not plain:
            traceback.print_exc()
        self.said.append(str(error) if plain else f"internal error: {type(error).__name__}: {error}")
        return True


def _draw(suite: Suite, done: SuiteResults, folder: Path) -> list[Path]:
    if not suite.figures or not done.scores:
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        note("figures are left out: matplotlib is not installed")
        return []
    from benchmarks.plots import save_figures

    return save_figures(folder, suite.figures(done))


def figures_of(done: SuiteResults) -> dict[str, float]:
    """The average of each variant over the data sets, `hm/maple`, `all/procap n_ctx 8`, where none is missing."""
    names = short_names(done.variants)
    return {
        f"{kind}/{name}": cell.mean
        for variant, name in zip(done.variants, names, strict=True)
        for kind, cell in _averages(done, variant).items()
        if cell is not None
    }


def short_names(variants: Sequence[Variant]) -> list[str]:
    """The method of each variant and what varies where it has several, in characters that MLflow allows in metrics."""
    methods = [variant.method for variant in variants]
    names = [
        " ".join([variant.method, *(f"{name} {value}" for name, value in variant.key.items())]) for variant in variants
    ]
    kept = [
        variant.method if methods.count(variant.method) == 1 else name
        for variant, name in zip(variants, names, strict=True)
    ]
    return [re.sub(r"[^\w .:/-]", "_", name) for name in kept]


def _averages(done: SuiteResults, variant: Variant) -> dict[str, Cell | None]:
    if done.suite.classes == "all":
        return {"all": average([done.cell(variant, dataset, Target(dataset)) for dataset in done.datasets])}
    return dict(zip(("base", "novel", "hm"), done.average_halves(variant), strict=True))
