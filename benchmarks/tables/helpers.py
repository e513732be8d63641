"""What all tables of suites share: how lines are called, where published figures stand beside ours, and the notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.results.published.tables import AVERAGE, DATASETS, display_name
from benchmarks.results.scores import Cell, describe_variant
from benchmarks.results.variant import SHOTS, Variant
from benchmarks.tables.notes import not_as_published, setting, unequal
from benchmarks.tables.table import Column, Item, Line, Sheet, Value

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults

BACKBONE = "ViT-B-16"
"""The backbone of every published figure, with its own weights, which are OpenAI's."""
HALVES = (Column("Base"), Column("Novel"), Column("HM"))
REPRODUCED = ", reproduced"
LEAD, ROOM = "Lead", 8
"""The column of what ProCAP is ahead by; beside more columns than that it is for programs alone."""
NAMED = 3
"""Missing results that a note names; it counts the others."""


def in_paper(done: SuiteResults) -> bool:
    """Whether the suite is done on the paper's data sets, so that published lines stand in the same tables."""
    return done.options.profile.name == "paper"


def hindrance(done: SuiteResults) -> str:
    """Why no result of the suite may be compared with a published figure; empty where that is right."""
    options = done.options
    if not in_paper(done):
        return "they are of generated data sets"
    backbones = {(entry.spec.config.backbone, entry.spec.config.pretrained) for entry in done.runs}
    others = sorted(f"{name} with {weights or 'its own'} weights" for name, weights in backbones - {(BACKBONE, None)})
    if others:
        return f"the backbone is {', '.join(others)}, not {BACKBONE} with OpenAI's weights"
    if options.quick:
        return "the schedules are the short ones of --quick"
    if options.shots not in ((), (SHOTS,)) and any(variant.shots is None for variant in done.variants):
        return f"the shots are {options.shots[0] or 'all'}, not {SHOTS}"
    if options.overrides:
        changed = ", ".join(f"{name} {value}" for name, value in options.overrides.items())
        return f"the recipes are changed: {changed}"
    return ""


def is_control(done: SuiteResults, variant: Variant) -> bool:
    """Whether ProCAP's recipe was chosen for a method whose published figures are of its own one."""
    chosen = in_paper(done) and done.options.recipe == "procap" and not variant.recipe
    return chosen and variant.method not in ("procap", "zeroshot")


def beside(done: SuiteResults, variant: Variant, datasets: Iterable[str], published: float | None) -> float | None:
    """`published` where a result of `variant` on `datasets` may be compared with it: same images and kind of recipe."""
    if hindrance(done) or is_control(done, variant) or done.changed_sets.keys() & set(datasets):
        return None
    return published


def value(
    done: SuiteResults, variant: Variant, datasets: Iterable[str], cell: Cell | None, published: float | None = None
) -> Item:
    """A result beside its published figure. Of the first images of a test set there is no published one."""
    if cell is None or cell.limited:
        published = None
    return Value.of(cell, beside(done, variant, datasets, published))


def ours(done: SuiteResults, variant: Variant) -> str:
    """What a line of ours is called beside a column that says what varies."""
    return _recipe_said(done, variant, variant.name)


def ours_alone(done: SuiteResults, variant: Variant) -> str:
    """What a line of ours is called where nothing beside it says what varies."""
    return next(title for title, other in titled(done).items() if other == variant)


def reproduced(name: str, items: Iterable[Item]) -> str:
    """`name` with a word that its line repeats what is published, where it has any published figure."""
    return name + REPRODUCED * any(isinstance(item, Value) and item.published is not None for item in items)


def _recipe_said(done: SuiteResults, variant: Variant, name: str) -> str:
    return f"{name} (ProCAP's recipe)" if is_control(done, variant) else name


def theirs(method: str, venue: str = "") -> str:
    """What a line of the paper is called."""
    return f"{method} ({'published' if venue in ('', 'Ours') else venue})"


def group_of(done: SuiteResults, group: str, line: str) -> str:
    """Published figures that ours do not compare with are a group of their own, and so have a best of their own.

    So are those beside a control, whose lines are compared with each other: all of them have the same recipe.
    """
    apart = hindrance(done) or any(is_control(done, variant) for variant in done.variants)
    return f"{group} {line}" if apart and line == "published" else group


def printed(labels: Sequence[str], figures: Iterable[float | None], **more: object) -> Line:
    """A line of the paper."""
    items = tuple(None if figure is None else Value(figure) for figure in figures)
    return Line(tuple(labels), items, source="published", **more)  # type: ignore[arg-type]


def against_procap(done: SuiteResults, sheet: Sheet, figure: str) -> Sheet:
    """The sheet with a further column: that figure of our ProCAP minus those of every other line, also published ones.

    Lines are of one kind where all labels but the last are equal. Without one ProCAP that compares with published
    figures the sheet is as it was.
    """
    place = [column.title for column in sheet.columns].index(figure)
    procap = [ours_alone(done, variant) for variant in done.variants if variant.method == "procap"]
    own = {
        line.labels[:-1]: item
        for line in sheet.lines
        if line.source == "ours" and [line.labels[-1].removesuffix(REPRODUCED)] == procap
        if isinstance(item := line.items[place], Value)
        if item.published is not None
    }

    def lead(line: Line) -> Item:
        item, against = line.items[place], own.get(line.labels[:-1])
        if not isinstance(item, Value) or item is against or against is None or item.limited:
            return None
        return Value(against.mean - item.mean)

    lines = tuple(replace(line, items=(*line.items, lead(line))) for line in sheet.lines)
    if not any(line.items[-1] for line in lines):
        return sheet
    column = Column(LEAD, "", detail=len(sheet.columns) > ROOM)
    note = (
        f"{LEAD}{' (in CSV and JSON alone)' if column.detail else ''}: {figure} of our ProCAP minus that of the line."
    )
    return replace(sheet, columns=(*sheet.columns, column), lines=lines, notes=(*sheet.notes, note))


def whole_paper(datasets: Sequence[str]) -> bool:
    """Whether these are the eleven data sets that published averages are over."""
    return set(datasets) == set(list(DATASETS)[:11])


def notes(done: SuiteResults, *own: str, halves: bool = False) -> tuple[str, ...]:
    """What must be known to read the figures of a suite: `own` after what all have in common."""
    found = ["Accuracy in %, computed from the integer counts of the result files."]
    if halves:
        found.append("HM is the harmonic mean of mean base and mean novel accuracy.")
    found += [_seeds(done, halves), *(line for line in own if line)]
    if done.paper_rounding:
        found.append(
            "Paper rounding: accuracies of single runs with one decimal, as older logs had them, their means with two, "
            "and HM of those."
        )
    found += _recipes(done) + _missing(done) + _shorter(done)
    if any(score.result.limited for score in done.scores.values()):
        found.append("† limited: only the first images of a test set; never averaged with whole results nor marked.")
    found += not_as_published(done.changed_sets)
    found += unequal(list(done.scores.values()))
    if why := hindrance(done):
        instead = "are a group of their own" if in_paper(done) else "stand in tables of their own"
        found.append(f"These results do not compare with published ones, which {instead}: {why}.")
    elif any(is_control(done, variant) for variant in done.variants):
        found.append(
            "Lines of ProCAP's recipe instead of a method's own are not compared with published ones, which are a "
            "group of their own."
        )
    return tuple(found)


def average_note(done: SuiteResults) -> str:
    """Which of the two readings of an average HM is printed, and the figures of the other one."""
    if len(done.datasets) < 2:
        return ""
    means = [(name, cell) for name, variant in titled(done).items() if (cell := done.mean_of_hms(variant))]
    listed = "; ".join(f"{name} {cell.mean:.2f}" for name, cell in means)
    text = f"{AVERAGE}: over {len(done.datasets)} data sets; its HM is that of average base and average novel accuracy."
    return f"{text} The mean of the data sets' HMs is: {listed}." if listed else text


def titled(done: SuiteResults) -> dict[str, Variant]:
    """The variants by title; those that share one are told apart by what varies."""
    return {title: variants[0] for title, variants in rows_of(done).items()}


def rows_of(done: SuiteResults, column: str = "") -> dict[str, list[Variant]]:
    """The variants by title, told apart where they share one by what varies, apart from the key of that name."""
    said = [
        ", ".join(f"{key} {value}" for key, value in variant.key.items() if key != column) for variant in done.variants
    ]
    apart = {(variant.name, words) for variant, words in zip(done.variants, said, strict=True)}
    names = [name for name, _ in apart]
    found: dict[str, list[Variant]] = {}
    for variant, words in zip(done.variants, said, strict=True):
        title = f"{variant.name} ({words})" if names.count(variant.name) > 1 and words else variant.name
        found.setdefault(_recipe_said(done, variant, title), []).append(variant)
    return found


def name_of(dataset: str) -> str:
    """What a data set is called in tables."""
    return display_name(dataset)


def _seeds(done: SuiteResults, halves: bool) -> str:
    seeds = done.options.seeds
    if len(seeds) == 1:
        return f"One seed: {seeds[0]} (n = 1)."
    of_hm = "; that of HM is over the HMs of the single seeds" if halves else ""
    return (
        f"Means over n = {len(seeds)} seeds ({', '.join(map(str, seeds))}); ± is the sample standard deviation "
        f"(ddof = 1){of_hm}."
    )


def _recipes(done: SuiteResults) -> list[str]:
    """The setting of all runs of the plan, and which recipes there are where they differ."""
    facts = {entry.spec.config.path: entry.spec.config for entry in done.runs}
    variants = [(config.method, describe_variant(config)) for config in facts.values()]
    found = setting(variants)
    recipes = list(dict.fromkeys(facts["recipe"] for _, facts in variants if "recipe" in facts))
    if len(recipes) > 1:
        changes = ", ".join(f"{name} {value}" for name, value in done.options.overrides.items())
        custom = f"changed ({changes})" if changes else "changed in what a line names"
        words = {"published": "each method's own", "procap": "ProCAP's", "custom": custom}
        found.append(f"Recipes: {'; '.join(words[name] for name in recipes)}.")
    return found


def _shorter(done: SuiteResults) -> list[str]:
    if not done.shorter:
        return []
    command = done.suite.command(done.options, done.results)
    return [
        f"LIMITED beside whole: {len(done.shorter)} evaluations ({_named(done.shorter)}) are of the first images, "
        f"and those of other seeds of all. A dash is what they take with them; `{command}` counts all."
    ]


def _named(places: Sequence[tuple[str, str]]) -> str:
    """The first of some runs and targets, and how many more there are."""
    named = ", ".join(f"{path} on {target}" for path, target in places[:NAMED])
    return f"{named} and {len(places) - NAMED} more" if len(places) > NAMED else named


def _missing(done: SuiteResults) -> list[str]:
    if not done.missing:
        return []
    whole = sum(len(entry.spec.targets) for entry in {entry.path: entry for entry in done.runs}.values())
    command = done.suite.command(done.options, done.results)
    return [
        f"MISSING: {len(done.missing)} of {whole} evaluations ({_named(done.missing)}). A dash is what they take with "
        f"them; `{command}` runs them."
    ]
