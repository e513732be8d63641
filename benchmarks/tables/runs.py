"""Tables of whatever runs there are, without a suite: both halves of every data set, and other targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.results.scores import Cell, Score, describe_variant, is_half, variants_of
from benchmarks.tables.helpers import HALVES
from benchmarks.tables.notes import not_as_published, setting, unequal
from benchmarks.tables.plain import Table, mean_of_hms
from benchmarks.tables.table import Column, Line, Sheet, Value

# A speed has no better end here: runs were timed one after the other, on whatever machine and beside whatever else.
SPEEDS = (Column("FPS", "", digits=0), Column("training s", "", digits=1))
DETAILS = (Column("Method name", "", detail=True), Column("Data set variant", "", detail=True))
HALVES_DETAILS = (Column("FPS of the model", "", digits=0, detail=True), Column("mean of HMs", detail=True), *DETAILS)


def run_sheets(table: Table) -> list[Sheet]:
    """One sheet of the halves and one of the other targets, each where there is any."""
    return [*([_halves(table)] if table.rows else []), *([_targets(table)] if table.others else [])]


def _halves(table: Table) -> Sheet:
    scores = [score for score in table.scores if is_half(score)]
    changed = variants_of(scores)
    lines = []
    for row in (*table.rows, *table.averages):
        average = row in table.averages
        speeds = (row.images_per_second, row.train_seconds, row.images_per_second_model)
        hms = mean_of_hms(table.rows, row.title) if average else None
        items = (
            *map(Value.of, row.cells()),
            *(None if figure is None else Value(figure) for figure in speeds),
            Value.of(hms),
            row.method,
            _said(changed, row.dataset),
        )
        lines.append(Line((row.dataset, row.title), items, group=row.dataset, average=average))
    cells = [cell for row in table.rows for cell in row.cells() if cell]
    notes = (
        "Accuracy in %, computed from integer counts; HM is the harmonic mean of base and novel accuracy.",
        *_average(table),
        *_seeds(cells),
        *(["There is no HM or average over different seeds."] if _differ(cells) else []),
        "FPS: images per second in the evaluation of both halves, decoding included, warm-up left out (FPS of the "
        "model, in CSV and JSON alone: without waiting for images); training s: training alone. All are of the machine "
        "that ran it.",
        *_of_runs(scores, cells, changed),
        *table.left_out,
        *_unrated(scores, table.title_of),
        *unequal(scores),
    )
    labels, columns = ("Data set", "Method"), (*HALVES, *SPEEDS, *HALVES_DETAILS)
    return Sheet("table", "Base and novel classes", labels, columns, tuple(lines), notes, wide=True)


def _targets(table: Table) -> Sheet:
    scores = [score for score in table.scores if not is_half(score)]
    changed = variants_of(scores)
    lines = []
    for row in table.others:
        sets = [place.partition(":")[0] for place in (row.trained_on, row.target)]
        items = (Value.of(row.accuracy), row.method, _said(changed, *sets))
        # What a model was trained on sets it apart as much as its method does: only the method may vary in a group.
        lines.append(Line((row.trained_on, row.target, row.title), items, group=f"{row.trained_on} {row.target}"))
    cells = [row.accuracy for row in table.others]
    notes = (
        "Accuracy in %, computed from integer counts. Lines of one training set and one target are a group.",
        *_seeds(cells),
        *_of_runs(scores, cells, changed),
        *table.left_out,
        *unequal(scores),
    )
    labels, columns = ("Trained on", "Tested on", "Method"), (Column("Accuracy"), *DETAILS)
    return Sheet("table-targets", "Other targets", labels, columns, tuple(lines), notes, wide=True)


def _said(changed: Mapping[str, str], *datasets: str) -> str | None:
    """How the data sets of a line differ from published ones; None where they do not."""
    return "; ".join(dict.fromkeys(f"{name}: {changed[name]}" for name in datasets if name in changed)) or None


def _average(table: Table) -> list[str]:
    if not table.averages:
        return []
    means = [(row.title, mean_of_hms(table.rows, row.title)) for row in table.averages if row.hm]
    listed = "; ".join(f"{title} {cell.mean:.2f}" for title, cell in means if cell)
    also = f" The mean of the data sets' HMs is: {listed}." if listed else ""
    return [f"Average's HM is the harmonic mean of average base and average novel accuracy.{also}"]


def _differ(cells: Sequence[Cell]) -> bool:
    return len({cell.seeds for cell in cells}) > 1


def _seeds(cells: Sequence[Cell]) -> list[str]:
    """What the deviations are, and of which seeds everything is where they are the same."""
    found = []
    if any(cell.std is not None for cell in cells):
        found.append("± is the sample standard deviation over seeds (ddof = 1).")
    if not _differ(cells):
        seeds = cells[0].seeds
        found.append(f"n = {len(seeds)}: seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.")
    return found


def _of_runs(scores: Sequence[Score], cells: Sequence[Cell], changed: Mapping[str, str]) -> list[str]:
    configs = {score.config.path: score.config for score in scores}.values()
    found = setting([(config.method, describe_variant(config)) for config in configs])
    if any(cell.limited for cell in cells):
        found.append(
            "† limited: only the first images of a test set were evaluated; never averaged with whole results nor "
            "marked."
        )
    return found + not_as_published(changed)


def _unrated(scores: Sequence[Score], title_of: Mapping[str, str]) -> list[str]:
    """Methods of which a speed is missing because the image tower did not run."""
    cached = [title_of[score.config.path] for score in scores if score.result.features != "computed"]
    if not cached:
        return []
    named = ", ".join(dict.fromkeys(cached))
    return [f"FPS leaves out evaluations with image features from the cache ({named}): procap eval --force times them."]
