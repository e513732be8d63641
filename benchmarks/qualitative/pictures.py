"""Make the qualitative pictures: predictions where methods disagree, attention maps, and learned prompts.

Beside predictions.png, eigencam.png and prompts.png, pictures.json records every answer and number in them. With a
single method there are only the prompts. Shapes: M methods, N images of the target, S image size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.console.output import note
from benchmarks.plots.style import save_plots
from benchmarks.qualitative.eigencam import SIGN_RULE, image_maps
from benchmarks.qualitative.plots import draw_eigencam, draw_predictions, draw_prompts
from benchmarks.qualitative.prompts import read_prompts, record_prompts
from benchmarks.qualitative.samples import SELECTION_RULE, count_kinds, describe_kind, list_kinds, select_images
from benchmarks.results.suite import PICTURES, SuiteResults
from procap.errors import UsageError
from runner.config import RuntimeConfig, Target
from runner.engine import autocast
from runner.environment import environment
from runner.evaluate import TrainedRun, evaluate, load_trained
from runner.results import write_json
from runner.setup import clip_transform, label_space
from shards.fewshot import evaluation_split
from shards.reader import open_dataset

CAM_RULE = (
    "patches after the last block, prompts and class token left out, float32 for every method, each map from its own "
    "lowest value, 0, to its own highest, 1"
)


def make_pictures(results: SuiteResults, runtime: RuntimeConfig) -> dict[str, Any]:
    """Make the pictures of a suite: images of its first data set, prompts of its last, the first seed."""
    began = time.perf_counter()
    first, last = results.options.datasets[0], results.options.datasets[-1]
    runs: dict[str, dict[str, TrainedRun]] = {first: {}, last: {}}
    for run in results.runs:
        if run.dataset in runs and run.seed == results.options.seeds[0]:
            runs[run.dataset][run.variant.name] = load_trained(run.spec.config, runtime)
    plots: dict[str, Any] = {}
    record: dict[str, Any] = {}
    texts: dict[str, dict[str, str]] = {}
    if len(runs[first]) > 1:
        target = results.suite.targets(results.options, first)[0]
        record, pixels = compare(runs[first], target, runtime)
        plots["predictions"] = partial(draw_predictions, record, pixels)
        plots["eigencam"] = partial(draw_eigencam, record, pixels)
        titles, classes = ", ".join(runs[first]), ", ".join(pick["class"] for pick in record["picks"])
        texts["predictions"] = {
            "caption": f"Predictions on {first}. Chosen: {SELECTION_RULE}.",
            "alt": f"Test images of {classes} with the answers of {titles}",
        }
        texts["eigencam"] = {
            "caption": f"EigenCAM of the same images: first principal component of {CAM_RULE}; {SIGN_RULE}.",
            "alt": f"The same test images, each with a map of where {titles} look",
        }
    else:
        note("only one method: pictures of predictions and attention are left out")
    described = [read_prompts(title, run) for title, run in runs[last].items()]
    record["prompts"] = record_prompts(described)
    if record["prompts"]["random"]:
        plots["prompts"] = partial(draw_prompts, record["prompts"], last)
        texts["prompts"] = {
            "caption": f"Learned text prompts of the first layer next to random ones; {record['prompts']['order']}.",
            "alt": "Heat maps of text prompts, a row per token and a column per dimension, at random, before and after "
            f"training: {', '.join(runs[last])}",
        }
    save_plots(results.folder, plots)
    record |= {
        "runs": results.paths,
        "pictures": texts,
        "seconds": time.perf_counter() - began,
        "environment": environment(next(iter(runs[last].values())).clip.device),
    }
    write_json(results.folder / PICTURES, record)
    return record


def compare(
    runs: Mapping[str, TrainedRun], target: Target, runtime: RuntimeConfig, images: int = 8
) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """Record which images of `target` each run, by title, gets right, and what it predicts for some of them.

    Returns that and the pixels [S, S, 3] of these images.
    """
    if len(runs) < 2:
        raise UsageError("pictures of where methods disagree need at least two methods")
    shards = open_dataset(runtime.data, target.dataset)
    selection = evaluation_split(shards, target.classes, target.split)
    predicted = _load_predictions(runs, target, runtime, selection.images.labels)
    count = predicted.shape[1]
    right = predicted == selection.images.labels[:count]
    plans = {}
    for title, run in runs.items():
        with autocast(run.config.precision, run.clip.device):
            plans[title] = run.method.classifier(label_space(shards.manifest, selection.classnames)).image_plan
    as_seen = clip_transform(next(iter(runs.values())).clip)
    chosen = select_images(right, images)
    names = [name.replace("_", " ") for name in selection.classnames]
    groups, pixels, picks = list_kinds(right), [], []
    for index in chosen:
        image = selection.images.image(index)
        pixels.append(np.asarray(as_seen.crop(image)))
        maps = {
            title: image_maps(run.clip, clip_transform(run.clip)(image)[None].to(run.clip.device), plans[title])
            for title, run in runs.items()
        }
        picks.append(
            {
                "place": index,
                "position": int(selection.images.positions[index]),
                "path": selection.images.paths[index],
                "kind": describe_kind(groups[index], list(runs)),
                "class": names[int(selection.images.labels[index])],
                "answers": {title: names[labels[index]] for title, labels in zip(runs, predicted, strict=True)},
                "right": dict(zip(runs, groups[index], strict=True)),
                "eigencam": {
                    title: {"share_of_variance": float(cam.share[0]), "map": cam.maps[0].tolist()}
                    for title, cam in maps.items()
                },
            }
        )
    record = {
        "target": str(target),
        "images": {"seen": count, "of": len(selection.images)},
        "methods": [
            {
                "title": title,
                "method": run.config.method,
                "run": run.config.path,
                "checkpoint_sha256": run.training.checkpoint_sha256,
                "correct": int(row.sum()),
            }
            for (title, run), row in zip(runs.items(), right, strict=True)
        ],
        "agreement": count_kinds(right, list(runs)),
        "pick_rule": SELECTION_RULE,
        "picks": picks,
        "eigencam": {"tokens": CAM_RULE, "sign": SIGN_RULE},
    }
    return record, pixels


def _load_predictions(
    runs: Mapping[str, TrainedRun], target: Target, runtime: RuntimeConfig, labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Load from the evaluations of the runs what each of them predicts for the images of `target` [M, N]."""
    answers = []
    for run in runs.values():
        result = evaluate(run.config, target, runtime, trained=run)
        answers.append(np.array(result.predicted)[: runtime.limit])
    return np.stack([predicted[: min(map(len, answers))] for predicted in answers])
