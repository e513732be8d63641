"""Plot accuracy over the number of prompt tokens or of epochs: on average, and by data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import (
    BASE,
    NOVEL,
    PAGE,
    Look,
    Plots,
    assign_dataset_looks,
    assign_looks,
    dagger,
    describe_seeds,
    grid,
    heading,
    styled,
)
from benchmarks.results.metrics import Halves, Metric
from benchmarks.results.published import tables as published
from benchmarks.results.published.tables import display_name
from benchmarks.results.suite import SuiteResults
from benchmarks.results.variant import Variant
from benchmarks.tables.rows import covers_paper, why_incomparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Points = Mapping[float, Halves]


def prompt_length_plots(suite: SuiteResults) -> Plots:
    """Return plots as in the paper: averages over the data sets on the left, harmonic means of each on the right."""
    return _drawings(suite, "prompt-length", "n_ctx", "prompt tokens", log=True)


def duration_plots(suite: SuiteResults) -> Plots:
    """Return the same plots over epochs; on the paper's data sets with published numbers beside ours."""
    printed: dict[str, Points] = {}
    if not why_incomparable(suite) and covers_paper(suite.datasets):
        for line in published.duration():
            cells = tuple(Metric(number) for number in (line.base, line.novel, line.hm))
            printed[line.key] = {**printed.get(line.key, {}), line.epochs: cells}  # type: ignore[dict-item]
    return _drawings(suite, "duration", "epochs", "epochs of training", printed=printed)


def _drawings(
    suite: SuiteResults,
    name: str,
    key: str,
    label: str,
    *,
    log: bool = False,
    printed: Mapping[str, Points] | None = None,
) -> Plots:
    """Return a plot for each method for which `key` varies."""
    variants: dict[str, dict[float, Variant]] = {}
    for variant in suite.variants:
        if variant.key.get(key):
            variants.setdefault(variant.method, {})[variant.key[key]] = variant
    several = len(variants) > 1
    return {
        f"{name}-{method}" if several else name: partial(
            two_panels, suite, own, label, log=log, printed=(printed or {}).get(method, {})
        )
        for method, own in variants.items()
    }


@styled
def two_panels(
    suite: SuiteResults, variants: Mapping[float, Variant], label: str, *, log: bool, printed: Points
) -> Figure | None:
    """Plot averages of base, novel and harmonic mean (left), and the harmonic mean of each data set (right).

    A missing point leaves a gap. Points of `printed` (published) are hollow.
    """
    from matplotlib.figure import Figure

    places = sorted(variants)
    averages: Points = {
        place: suite.average_halves(variants[place])
        if len(suite.datasets) > 1
        else suite.halves(variants[place], suite.datasets[0])
        for place in places
    }
    hms = {name: {place: suite.halves(variants[place], name)[2] for place in places} for name in suite.datasets}
    every = [cell for halves in averages.values() for cell in halves] + [
        c for own in hms.values() for c in own.values()
    ]
    if not any(every):
        return None
    method = variants[places[0]].name
    hm = assign_looks({method: variants[places[0]].method})[method]
    figure = Figure(figsize=(PAGE, 2.75), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = (("base", BASE), ("novel", NOVEL), ("harmonic mean", hm))
    for kind, (title, look) in enumerate(kinds):
        _line(left, {place: halves[kind] for place, halves in averages.items()}, look, title)
        if printed:
            paper = {place: halves[kind] for place, halves in sorted(printed.items())}
            _line(left, paper, look, f"{title}\n(published)", hollow=True)
    looks = assign_dataset_looks(suite.datasets)
    for name, own in hms.items():
        _line(right, own, looks[name], display_name(name) + dagger(own.values()))
    some = (
        f"average over {len(suite.datasets)} data sets" if len(suite.datasets) > 1 else display_name(suite.datasets[0])
    )
    left.set_title(f"(a) {some}{dagger(cell for halves in averages.values() for cell in halves)}", loc="left")
    right.set_title("(b) harmonic mean by data set", loc="left")
    left.set_ylabel("accuracy, %")
    right.set_ylabel("harmonic mean, %")
    for panel in (left, right):
        if log:
            panel.set_xscale("log", base=2)
        panel.set_xticks(places, [f"{place:g}" for place in places])
        panel.minorticks_off()
        panel.set_xlabel(label)
        grid(panel, "y")
    heading(figure, f"{method}: accuracy by {label} ({describe_seeds(every)})", every)
    _legends(left, right)
    return figure


def _line(axes: Axes, points: Mapping[float, Metric | None], look: Look, label: str, *, hollow: bool = False) -> None:
    mean = [cell.mean if cell else math.nan for cell in points.values()]
    bars = [cell.std if cell and cell.std is not None else math.nan for cell in points.values()]
    more: dict[str, Any] = {"markerfacecolor": "white", "linewidth": 0.7} if hollow else {}
    axes.plot(list(points), mean, zorder=2 if hollow else 3, **look.line(label=label, **more))
    if not all(map(math.isnan, bars)):
        axes.errorbar(
            list(points), mean, bars, color=look.colour, linestyle="none", capsize=2, elinewidth=0.8, zorder=3
        )


def _legends(left: Axes, right: Axes) -> None:
    """Place the legends to the right of their panels: inside or below they would cover lines or each other."""
    for panel in (left, right):
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handlelength=2.6)
