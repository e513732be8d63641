"""The runtime table: what was measured last on the suite's data sets, beside the paper's, and ratios of methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.results.published import tables as published
from benchmarks.results.runtime import load_runtime_reports
from benchmarks.tables.helpers import BACKBONE, in_paper, name_of, theirs
from benchmarks.tables.runtime_report import GUESSED, list_notes
from benchmarks.tables.table import Column, Item, Line, Sheet, Value

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults

COLUMNS = (
    Column("training s", "low", digits=1),
    # What was not run to its end has a column of its own: it is no measurement that could be the best.
    Column(f"{GUESSED} training s", "", digits=1),
    Column("FPS encoder", digits=1),
    Column("FPS end to end", digits=1),
    Column("Accuracy"),
    Column("Steps measured", ""),
)
RATIOS = (
    Column("training s", "low"),
    Column(f"{GUESSED} training s", ""),
    Column("FPS encoder"),
    Column("FPS end to end"),
)
RATIO, RATIO_TITLE = ("procap", "maple"), "ProCAP / MaPLe-style"
PUBLISHED_WORK = {"epochs": 10, "batch": 32, "test_batch": 100}
"""What the paper measured, by the names of a measurement's settings."""
WARNINGS = ("THE MACHINE WAS BUSY", GUESSED, "†", "FAILED", "published:")
"""How notes of a measurement begin without which its ratios are not to be judged."""


def runtime_sheets(done: SuiteResults) -> list[Sheet]:
    """Nothing where these methods were not measured on these data sets."""
    report = newest_report(done)
    if report is None:
        return []
    lines = [line for dataset in done.datasets for line in (*_published(done, dataset), *_ours(done, report, dataset))]
    title, labels = "Training time and speed of inference", ("Data set", "Method", "Mode")
    sheets = [Sheet(done.suite.name, title, labels, *_filled(COLUMNS, lines), _notes(done, report), wide=True)]
    if over := [line for dataset in done.datasets for line in _ratios(done, report, dataset)]:
        said = ["What ProCAP takes or does over what MaPLe-style does on the same machine; a machine is in no ratio."]
        if any(line.items[1] for line in over):
            said.append(f"{GUESSED} of trainings that were not run to their end.")
        if any(line.source == "published" for line in over) and (why := unlike(report)):
            said.append(f"These ratios do not compare with published ones: {why}.")
        sheets.append(Sheet(f"{done.suite.name}-ratios", RATIO_TITLE, labels[::2], *_filled(RATIOS, over), tuple(said)))
    return sheets


def newest_report(done: SuiteResults) -> dict[str, Any] | None:
    """The report that was written last, of those with every data set and method of the suite, on its backbone."""
    from procap.weights.loading import canonical

    options = done.options
    backbone, _ = canonical(options.backbone or options.profile.backbone)
    found: list[tuple[float, str, dict[str, Any]]] = []
    for file, report in load_runtime_reports(done.results):
        sets, methods = ({row[name] for row in report["rows"]} for name in ("dataset", "method"))
        if report["backbone"]["name"] == backbone and sets >= set(options.datasets) and methods >= set(options.methods):
            found.append((file.stat().st_mtime, str(file), report))
    return max(found, key=lambda one: one[:2])[2] if found else None


def ratios(rows: list[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Training seconds, encoder's and whole speed of ProCAP over MaPLe-style, of one data set, mode and precision."""
    pair = [next((row for row in rows if row["method"] == method), None) for method in RATIO]
    if pair[0] is None or pair[1] is None:
        return None, None, None
    seconds = [row["train_seconds"] for row in pair if row]
    speeds = [[row[name]["median"] for row in pair if row] for name in ("encoder_fps", "end_to_end_fps")]
    return _over(seconds), _over(speeds[0]), _over(speeds[1])


def published_ratios(dataset: str) -> tuple[float, float] | None:
    """Training seconds and speed of ProCAP over MaPLe-style as the paper has them; None for other data sets."""
    lines = {line.key: line for line in published.runtime() if line.dataset == dataset}
    if set(RATIO) - set(lines):
        return None
    own, other = (lines[key] for key in RATIO)
    return own.train_seconds / other.train_seconds, own.images_per_second / other.images_per_second


def unlike(report: dict[str, Any]) -> str:
    """Why the report's ratios are not of the work that the paper measured; empty where they are."""
    if (backbone := report["backbone"]["name"]) != BACKBONE:
        return f"the backbone is {backbone}, not {BACKBONE}"
    settings = report["settings"]
    others = (
        f"{name.replace('_', ' ')} is {settings[name]}, not {known}"
        for name, known in PUBLISHED_WORK.items()
        if settings[name] != known
    )
    return ", ".join(others)


def guessed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a training that the ratio is of was not run to its end."""
    return any(row["extrapolated"] for row in rows if row["method"] in RATIO)


def warnings(report: dict[str, Any]) -> list[str]:
    """What was measured, on what, and what is to be said of it before its ratios are judged."""
    of, recipe, *others = list_notes(report)
    return [of, recipe, *(line for line in others if line.startswith(WARNINGS))]


def blocks(report: dict[str, Any], dataset: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of one data set by mode, and by precision where there are several."""
    rows = [row for row in report["rows"] if row["dataset"] == dataset]
    several = len({row["precision"] for row in report["rows"]}) > 1
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(f"{row['mode']} {row['precision']}" if several else row["mode"], []).append(row)
    return found


def _published(done: SuiteResults, dataset: str) -> Iterator[Line]:
    """Measured on another machine, so that nothing of it is marked the best."""
    name = name_of(dataset)
    for line in published.runtime() if in_paper(done) else ():
        if line.dataset == dataset:
            figures = (line.train_seconds, None, None, line.images_per_second, line.accuracy)
            items = tuple(None if figure is None else Value(figure) for figure in figures)
            yield Line((name, theirs(line.method), "-"), (*items, None), "published", f"{name} {line.method}")


def _ours(done: SuiteResults, report: dict[str, Any], dataset: str) -> Iterator[Line]:
    name = name_of(dataset)
    for mode, rows in blocks(report, dataset).items():
        for row in rows:
            speeds = [Value(row[kind]["median"]) for kind in ("encoder_fps", "end_to_end_fps")]
            steps = f"{row['steps_measured']} of {row['steps']}" if row["steps"] else "-"
            seconds = row["train_seconds"]
            training = None if seconds is None else Value(seconds)
            items = (*_by_end(training, row["extrapolated"]), *speeds, _accuracy(row), steps)
            yield Line((name, row["title"], mode), items, group=name)


def _ratios(done: SuiteResults, report: dict[str, Any], dataset: str) -> Iterator[Line]:
    """The paper's machine is not ours: only how one method relates to the other can be compared."""
    name = name_of(dataset)
    known = published_ratios(dataset) if in_paper(done) else None
    if known:
        yield Line(
            (name, "published"), (Value(known[0]), None, None, Value(known[1])), "published", f"{name} published"
        )
    for mode, rows in blocks(report, dataset).items():
        seconds, encoder, whole = ratios(rows)
        beside = known if known and not unlike(report) else (None, None)
        figures = ((seconds, None if guessed(rows) else beside[0]), (encoder, None), (whole, beside[1]))
        training, *speeds = (None if figure is None else Value(figure, published=other) for figure, other in figures)
        items = (*_by_end(training, guessed(rows)), *speeds)
        if any(items):
            yield Line((name, mode), items, group=f"{name} {mode}")


def _by_end(training: Item, extrapolated: bool) -> tuple[Item, Item]:
    """Seconds of a training, or their ratio, in the column of those that were run to their end or of the others."""
    return (None, training) if extrapolated else (training, None)


def _filled(columns: Sequence[Column], lines: Sequence[Line]) -> tuple[tuple[Column, ...], tuple[Line, ...]]:
    """Columns and lines without those columns that have nothing."""
    places = [place for place in range(len(columns)) if any(line.items[place] is not None for line in lines)]
    kept = (replace(line, items=tuple(line.items[place] for place in places)) for line in lines)
    return tuple(columns[place] for place in places), tuple(kept)


def _accuracy(row: dict[str, Any]) -> Item:
    if row["accuracy"] is None:
        return None
    return Value(row["accuracy"], seeds=(1,), limited=row["test_images"] < row["test_images_all"])


def _over(pair: list[float | None]) -> float | None:
    first, second = pair
    return None if first is None or not second else first / second


def _notes(done: SuiteResults, report: dict[str, Any]) -> tuple[str, ...]:
    """Those of the measurement's own report that concern these columns."""
    others = ("GFLOP/s", "MB:", "Phases:", *(() if in_paper(done) else ("published:",)))
    kept = (line for line in list_notes(report) if not line.startswith(others))
    return tuple(kept)
