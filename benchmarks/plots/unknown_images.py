"""Plot the scores of known and unknown images, by which a threshold tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment.published import title_target
from benchmarks.plots import style
from benchmarks.plots.style import Plots
from benchmarks.results.detection import Detection, score_rule

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MAX_PANELS, BINS = 8, 40


def unknown_plots(frame: pd.DataFrame) -> Plots:
    """Return the histograms of the results with scores. frame: with titles in `title`."""
    scored = frame[frame.unknown.astype(bool)]
    return {"unknown-scores": partial(score_histograms, scored)} if len(scored) else {}


def pool_scores(results: Iterable[Mapping[str, Detection]]) -> dict[str, NDArray[np.float64]]:
    """Join the scores of several seeds: those of the known images, and of each unknown set by its title.

    results: of each seed, the detections by the target of the unknown set.
    """
    scores: dict[str, list[NDArray[np.float64]]] = {"known": []}
    for detections in results:
        # All detections of a seed have the same known images.
        scores["known"] += [detection.known for detection in detections.values()][:1]
        for target, detection in detections.items():
            scores.setdefault(title_target(target), []).append(detection.unknown)
    return {name: np.concatenate(parts) for name, parts in scores.items()}


def score_histograms(frame: pd.DataFrame) -> Figure:
    """Draw a panel for each of the first MAX_PANELS methods and known sets, a line for each set; seeds are pooled."""
    groups = [*frame.groupby(["target", "title"], sort=False)][:MAX_PANELS]
    figure, axes = style.panels(len(groups), 1.6, "score", "share of images")
    for panel, ((known, title), rows) in zip(axes, groups, strict=True):
        pooled = pool_scores(rows.unknown)
        edges = np.histogram_bin_edges(np.concatenate([*pooled.values()]), BINS)
        for number, (name, values) in enumerate(pooled.items()):
            shares = np.histogram(values, edges)[0] / len(values)
            # The known images are a grey area behind the lines of the others.
            look = {"color": style.make_look(number - 1).colour} if number else {"color": style.GREY, "fill": True}
            panel.stairs(shares, edges, label=name, **look)
        panel.set_title(f"{title} ({score_rule(rows)}), {known.removesuffix(':test')}")
        style.grid(panel, "y")
    style.heading(figure, "Scores of known and unknown images")
    style.legend(figure)
    return figure
