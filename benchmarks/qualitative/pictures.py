"""Make the qualitative pictures: predictions where methods disagree, attention maps, and learned prompts.

Next to predictions.png, eigencam.png and prompts.png, pictures.json records each answer and number in them. With a
single method there are only the prompts. Shapes: M methods, N images of the target, S image size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.plots.style import save_plots
from benchmarks.qualitative.eigencam import CAM_RULE, image_maps
from benchmarks.qualitative.learned_prompts import read_prompts, record_prompts
from benchmarks.qualitative.plots import draw_eigencam, draw_predictions, draw_prompts
from benchmarks.results.suite_results import PICTURES, SuiteResults
from runner.config import Target
from runner.engine import autocast
from runner.evaluate import evaluate_run
from runner.results import write_json
from runner.session import Run, Session
from runner.setup import label_space, make_eval_transform
from runner.trained_runs import load_trained
from shards.image_selection import select_target_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SELECTION_RULE = (
    "the first images of the split, in its order, that some methods get right and others get wrong; where there are "
    "none, the first images of the split"
)


def make_pictures(results: SuiteResults, session: Session) -> dict[str, Any]:
    """Make the pictures of a suite: images of its first data set, prompts of its last, the first seed."""
    first, last = results.options.datasets[0], results.options.datasets[-1]
    runs: dict[str, dict[str, Run]] = {first: {}, last: {}}
    for run in results.runs:
        if run.dataset in runs and run.seed == results.options.seeds[0]:
            runs[run.dataset][run.variant.name] = session.get_run(run.spec.config)
    # By name: what draws the picture, its caption, and a description of it.
    pictures: dict[str, tuple[partial[Figure], str, str]] = {}
    record: dict[str, Any] = {}
    if len(runs[first]) > 1:
        record, pixels = compare(runs[first], results.suite.targets(results.options, first)[0], session)
        titles, classes = ", ".join(runs[first]), ", ".join(pick["class"] for pick in record["picks"])
        draw, caption = partial(draw_predictions, record, pixels), f"Predictions on {first}. Chosen: {SELECTION_RULE}."
        pictures["predictions"] = draw, caption, f"Test images of {classes} with the answers of {titles}"
        draw, caption = partial(draw_eigencam, record, pixels), f"EigenCAM of the same images: {CAM_RULE}."
        pictures["eigencam"] = draw, caption, f"The same test images, each with a map of where {titles} look"
    tokens = [read_prompts(title, load_trained(run)) for title, run in runs[last].items()]
    prompts = record["prompts"] = record_prompts(tokens)
    if prompts["random"]:
        caption = "Learned text prompts of the first layer next to random ones."
        description = f"Heat maps of text prompts, a row per token, random and learned by {', '.join(runs[last])}"
        pictures["prompts"] = partial(draw_prompts, prompts, last), caption, description
    save_plots(results.folder, {name: draw for name, (draw, _, _) in pictures.items()})
    texts = {name: {"caption": caption, "alt": description} for name, (_, caption, description) in pictures.items()}
    record |= {"runs": results.paths, "pictures": texts}
    write_json(results.folder / PICTURES, record)
    return record


def compare(
    runs: Mapping[str, Run], target: Target, session: Session, images: int = 8
) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """Record which images of `target` each run, by title, gets right, and what it predicts for some of them.

    Returns that and the pixels [S, S, 3] of these images.
    """
    dataset, limit = session.dataset(target.dataset), session.runtime.limit
    selection = select_target_images(dataset, target.classes, target.split)
    results = [evaluate_run(run, target).predicted or [] for run in runs.values()]
    loaded = {title: load_trained(run) for title, run in runs.items()}
    # Results of earlier commands may have more images than --limit asks for now.
    count = min(map(len, results)) if limit is None else min(limit, *map(len, results))
    predicted = np.array([labels[:count] for labels in results])
    right = predicted == selection.images.labels[:count]
    plans = {}
    for title, run in loaded.items():
        # Prompts are computed at the precision of the run, as for its predictions.
        with autocast(run.config.precision, run.clip.device):
            plans[title] = run.method.classifier(label_space(dataset.manifest, selection.classnames)).image_plan
    # All runs have one backbone, and so the same pixels.
    as_seen = make_eval_transform(next(iter(loaded.values())).clip)
    names = [name.replace("_", " ") for name in selection.classnames]
    pixels, picks = [], []
    for index in select_images(right, images):
        image = selection.images.image(index)
        pixels.append(np.asarray(as_seen.crop(image)))
        maps = {
            title: image_maps(run.clip, make_eval_transform(run.clip)(image)[None].to(run.clip.device), plans[title])
            for title, run in loaded.items()
        }
        picks.append(
            {
                "index": index,
                "path": selection.images.paths[index],
                "class": names[int(selection.images.labels[index])],
                "answers": {title: names[labels[index]] for title, labels in zip(runs, predicted, strict=True)},
                "right": dict(zip(runs, right[:, index].tolist(), strict=True)),
                "eigencam": {title: cam[0].tolist() for title, cam in maps.items()},
            }
        )
    record = {"target": str(target), "images": {"seen": count, "of": len(selection.images)}, "picks": picks}
    return record, pixels


def select_images(right: NDArray[np.bool_], count: int) -> list[int]:
    """Select indices of at most `count` of the images that `right` [M, N] tells apart, by `SELECTION_RULE`."""
    differs = (right != right[0]).any(axis=0)
    return (np.flatnonzero(differs) if differs.any() else np.arange(right.shape[1]))[:count].tolist()
