"""Plot accuracy over a number that a suite varies: shots, prompt tokens, epochs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots import style
from benchmarks.plots.style import Plots, styled
from benchmarks.results.metrics import Halves, Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import AVERAGE, display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.grid import accuracy_on
from benchmarks.tables.rows import covers_paper, group_by_title, why_incomparable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Mapping[float, Halves]


def shots_plots(suite: SuiteResults) -> Plots:
    """Return the curves of the suite few-shot."""
    return {"few-shot": partial(few_shot_curves, suite)}


@styled
def few_shot_curves(suite: SuiteResults) -> Figure | None:
    """Plot a line per method, a panel for the average and one per data set; untrained methods are horizontal lines.

    A missing point leaves a gap. An average is drawn only if every data set has a result for that number of shots.
    """
    lines = {
        title: {float(variant.key.get("shots", 0)): variant for variant in variants}
        for title, variants in group_by_title(suite, "shots").items()
    }
    ticks = sorted({shots for variants in lines.values() for shots in variants if shots})
    names = [*([AVERAGE] if len(suite.options.datasets) > 1 else []), *suite.options.datasets]
    cells = {
        (name, title, shots): accuracy_on(suite, variant, name)
        for name in names
        for title, variants in lines.items()
        for shots, variant in variants.items()
    }
    if not any(cell for (_, _, shots), cell in cells.items() if shots):
        return None
    looks = style.assign_looks({title: next(iter(variants.values())).method for title, variants in lines.items()})
    figure, axes = style.panels(len(names), 1.6 if len(names) > 1 else 2.1, "shots per class", "accuracy, %")
    for panel, name in zip(axes, names, strict=True):
        for title, variants in lines.items():
            level = cells.get((name, title, 0))
            if level:
                look = looks[title]
                panel.axhline(level.mean, label=title, color=look.colour, linestyle=look.dashes, linewidth=1.2)
            if points := {shots: cells[name, title, shots] for shots in sorted(variants) if shots}:
                style.draw_curve(panel, points, looks[title], title, markersize=4)
        style.set_ticks(panel, ticks, base=2)
        limited = style.dagger(cell for (where, _, _), cell in cells.items() if where == name)
        panel.set_title(display_name(name) + limited, fontweight="bold" if name == AVERAGE else "normal")
        panel.set_facecolor("#f6f7f9" if name == AVERAGE else "white")
        style.grid(panel, "y")
    style.heading(
        figure, f"Accuracy on all classes by number of shots ({style.describe_seeds(cells.values())})", cells.values()
    )
    style.legend(figure)
    return figure


def prompt_length_plots(suite: SuiteResults) -> Plots:
    """Return plots as in the paper: averages over the data sets on the left, harmonic means of each on the right."""
    return _plots_by_method(suite, "prompt-length", "n_ctx", "prompt tokens", base=2)


def duration_plots(suite: SuiteResults) -> Plots:
    """Return the same plots over epochs; on the paper's data sets with published numbers beside ours."""
    printed: dict[str, dict[float, Halves]] = {}
    if not why_incomparable(suite) and covers_paper(suite.options.datasets):
        for line in published.duration():
            cells = Metric(line.base), Metric(line.novel), Metric(line.hm)
            printed.setdefault(line.key, {})[line.epochs] = cells
    return _plots_by_method(suite, "duration", "epochs", "epochs of training", printed=printed)


def _plots_by_method(
    suite: SuiteResults, name: str, key: str, label: str, base: int | None = None, printed: Mapping[str, Points] = {}
) -> Plots:
    """Return a plot for each method for which `key` varies."""
    variants: dict[str, dict[float, Variant]] = {}
    for variant in suite.variants:
        if variant.key.get(key):
            variants.setdefault(variant.method, {})[variant.key[key]] = variant
    return {
        f"{name}-{method}" if len(variants) > 1 else name: partial(
            average_and_datasets, suite, dict(sorted(own.items())), label, base, printed.get(method, {})
        )
        for method, own in variants.items()
    }


@styled
def average_and_datasets(
    suite: SuiteResults, variants: Mapping[float, Variant], label: str, base: int | None, printed: Points
) -> Figure | None:
    """Plot averages of base, novel and harmonic mean (left), and the harmonic mean of each data set (right).

    A missing point leaves a gap. Points of `printed` (published) are hollow.
    """
    from matplotlib.figure import Figure

    several = len(suite.options.datasets) > 1
    mean = AVERAGE if several else suite.options.datasets[0]
    averages: Points = {value: suite.halves(variant, mean) for value, variant in variants.items()}
    hms = {
        name: {value: suite.halves(variant, name)[2] for value, variant in variants.items()}
        for name in suite.options.datasets
    }
    every = [cell for halves in averages.values() for cell in halves]
    every += [cell for own in hms.values() for cell in own.values()]
    if not any(every):
        return None
    variant = next(iter(variants.values()))
    figure = Figure(figsize=(style.PAGE, 2.75), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = (
        ("base", style.BASE),
        ("novel", style.NOVEL),
        ("harmonic mean", style.assign_looks({"": variant.method})[""]),
    )
    hollow: dict[str, Any] = {"markerfacecolor": "white", "linewidth": 0.7}
    for kind, (title, look) in enumerate(looks):
        style.draw_curve(left, {value: halves[kind] for value, halves in averages.items()}, look, title)
        if printed:
            paper = {value: halves[kind] for value, halves in sorted(printed.items())}
            style.draw_curve(left, paper, look, f"{title}\n(published)", **hollow)
    dataset_looks = style.assign_dataset_looks(suite.options.datasets)
    for name, own in hms.items():
        style.draw_curve(right, own, dataset_looks[name], display_name(name) + style.dagger(own.values()))
    over = (
        f"average over {len(suite.options.datasets)} data sets" if several else display_name(suite.options.datasets[0])
    )
    left.set_title(f"(a) {over}{style.dagger(cell for halves in averages.values() for cell in halves)}")
    right.set_title("(b) harmonic mean by data set")
    left.set_ylabel("accuracy, %")
    right.set_ylabel("harmonic mean, %")
    for panel in (left, right):
        style.set_ticks(panel, list(variants), base)
        panel.set_xlabel(label)
        style.grid(panel, "y")
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    style.heading(figure, f"{variant.name}: accuracy by {label} ({style.describe_seeds(every)})", every)
    return figure
