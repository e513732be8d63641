"""Make the qualitative pictures: predictions where methods disagree, attention maps, and learned prompts.

    predictions.png/.pdf   images that some methods get right and others do not, with every answer
    eigencam.png/.pdf      EigenCAM of the same images under the prompts of every method
    prompts.png/.pdf       learned text prompts as heat maps, beside random ones
    pictures.json          which images, how they were selected, and every answer and number in the pictures

With a single method there are only the prompts and the record.

Shapes: M methods, N images of the target, S image size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.console.output import note
from benchmarks.plots import save_plots
from benchmarks.qualitative.plots import CAM_LOOK, Picture, draw_eigencam, draw_predictions, draw_prompts
from benchmarks.qualitative.prompts import LearnedPrompts, learned_prompts, prompts_record, random_prompts
from benchmarks.qualitative.samples import SELECTION_RULE, Sample, count_kinds, describe_kind, select_images
from benchmarks.results.pictures import FILE, planned_paths
from benchmarks.results.published.tables import display_name
from procap.classifier import Classifier
from procap.eigencam import SIGN_RULE, image_maps
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import ALONE
from runner.engine import autocast
from runner.environment import environment, num_decoders
from runner.evaluate import Predictions, TrainedRun, load_trained
from runner.results import write_json
from runner.setup import check_content, label_space
from runner.threads import fitting_threads
from shards.fewshot import Selection, evaluation_split
from shards.loader import evaluation_batches
from shards.reader import ShardSet, open_dataset
from shards.transfer import to_device
from shards.transforms import EvalTransform, eval_transform

if TYPE_CHECKING:
    from benchmarks.results.suite import SuiteResults


@dataclass(frozen=True)
class Qualitative:
    """The pictures (PNG; the PDFs lie beside them), and the record with its file."""

    pictures: tuple[Path, ...]
    file: Path
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Predictions of several runs on a target. what: its data set and images, in words. record: all of it as JSON."""

    what: str
    pictures: tuple[Picture, ...]
    counts: Mapping[str, int]
    record: Mapping[str, Any]


def make_pictures(done: SuiteResults, runtime: RuntimeConfig) -> Qualitative:
    """Make the pictures of a suite in its folder: images of its first data set, prompts of its last, the first seed."""
    first, last = done.datasets[0], done.datasets[-1]
    runs: dict[str, dict[str, TrainedRun | RunConfig]] = {first: {}, last: {}}
    for entry in done.runs:
        if entry.dataset in runs and entry.seed == done.options.seeds[0]:
            runs[entry.dataset][entry.variant.name] = entry.spec.config
    [target, *_] = done.suite.targets(done.options, first)
    prompts = runs[last] if last != first else None
    return make_qualitative(runs[first], target, runtime, done.folder, prompts=prompts, planned=planned_paths(done))


def make_qualitative(
    trained: Mapping[str, TrainedRun | RunConfig],
    dataset: str | Target,
    runtime: RuntimeConfig,
    folder: Path,
    images: int = 8,
    *,
    prompts: Mapping[str, TrainedRun | RunConfig] | None = None,
    planned: Sequence[str] = (),
) -> Qualitative:
    """Compare finished runs on `dataset` and write the pictures and the record into `folder`.

    trained: title and run of every method; runs given as configurations are loaded. One alone is compared with nothing.
    dataset: a data set, of which all classes and the test split are taken, or a target.
    prompts: the runs whose text prompts are shown, the same ones by default; those without learned prompts are named
        in the record and left out.
    planned: the runs that the record names as those of the plan.
    `runtime.limit` keeps the first images of the target, and the pictures say so. Draws no random number but the values
    of the random prompts.
    Raises UsageError for no image, UserError for a run that is not finished or was trained on other content than
    `runtime.data` holds, DataError for an image that cannot be read.
    """
    began = time.perf_counter()
    runs = _load_runs(trained, runtime)
    target = Target.parse(dataset, runtime.data) if isinstance(dataset, str) else dataset
    drawings: dict[str, Any] = {}
    record: dict[str, Any] = {}
    if len(runs) > 1:
        found = compare(runs, target, runtime, images)
        record |= found.record
        drawings["predictions"] = partial(draw_predictions, found.pictures, found.counts, found.what)
        drawings["eigencam"] = partial(draw_eigencam, found.pictures, display_name(target.dataset))
    else:
        note("one method alone: pictures of predictions and attention are left out")
    shown = [learned_prompts(*one) for one in (runs if prompts is None else _load_runs(prompts, runtime)).items()]
    learned = [one for one in shown if isinstance(one, LearnedPrompts)]
    start = random_prompts(learned)
    record["prompts"] = prompts_record(start, shown)
    drawings["prompts"] = lambda: None if start is None else draw_prompts(start, learned)
    written = save_plots(folder, drawings)
    words = describe_pictures(record)
    record |= {
        "runs": list(planned),
        "pictures": {picture.stem: words[picture.stem] for picture in written},
        "seconds": time.perf_counter() - began,
        "environment": environment(next(iter(runs.values())).clip.device),
    }
    write_json(folder / FILE, record)
    return Qualitative(tuple(written), folder / FILE, record)


def compare(runs: Mapping[str, TrainedRun], target: Target, runtime: RuntimeConfig, images: int = 8) -> Comparison:
    """What every run, by title, answers on `target`, and the maps of at most `images` images.

    Raises as above, and UsageError for fewer than two runs.
    """
    if len(runs) < 2:
        raise UsageError("pictures of where methods disagree need at least two methods")
    if images < 1:
        raise UsageError(f"images = {images}: show at least one")
    for run in runs.values():
        if run.config.dataset == target.dataset:
            what, digest = f"{run.config.path} was trained", run.training.manifest_digest
            check_content(what, target.dataset, digest, runtime.data, "train")
    shards = open_dataset(runtime.data, target.dataset)
    selection = evaluation_split(shards, target.classes, target.split)
    wanted = min(len(selection.images), runtime.limit or len(selection.images))
    viewers = {title: _Viewer(run, shards, selection) for title, run in runs.items()}
    answers = {title: viewer.predict(wanted, runtime) for title, viewer in viewers.items()}
    right = np.stack([given == selection.images.labels[:wanted] for given in answers.values()])
    samples, counts = select_images(right, images), count_kinds(right, list(runs))
    pictures = tuple(_make_picture(sample, selection, viewers, answers) for sample in samples)
    seen = f"{wanted:,} test images" if target.split == "test" else f"{wanted:,} images of the {target.split} split"
    record = {
        "target": str(target),
        "images": {"seen": wanted, "of": len(selection.images)},
        "classes": list(selection.classnames),
        "methods": [
            {
                "title": title,
                "method": run.config.method,
                "run": run.config.path,
                "checkpoint_sha256": run.training.checkpoint_sha256,
                "correct": int(row.sum()),
                "prompts_in_image_tower": bool(viewers[title].classifier.image_plan),
            }
            for (title, run), row in zip(runs.items(), right, strict=True)
        ],
        "agreement": counts,
        "pick_rule": SELECTION_RULE,
        "picks": [
            _record_sample(sample, selection, picture, viewers)
            for sample, picture in zip(samples, pictures, strict=True)
        ],
        "eigencam": {
            "tokens": "patches after the last block, prompts and class token left out, float32 for every method",
            "sign": SIGN_RULE,
            "range": "each map from its own lowest value, 0, to its own highest, 1",
            **CAM_LOOK,
        },
    }
    part = f"first {seen}" if wanted < len(selection.images) else seen
    return Comparison(f"{display_name(target.dataset)}, {part}", pictures, counts, record)


class _Viewer:
    """Predictions, maps and pixels of one run on a target."""

    def __init__(self, run: TrainedRun, shards: ShardSet, selection: Selection) -> None:
        self.run, self.selection, clip = run, selection, run.clip
        with autocast(run.config, clip.device):
            space = label_space(shards.manifest, selection.classnames)
            self.classifier: Classifier = run.method.classifier(space)
        self.transform: EvalTransform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)

    def predict(self, wanted: int, runtime: RuntimeConfig) -> NDArray[np.int64]:
        """The class [N] of each of the first `wanted` images, in the batches of an evaluation."""
        config, device = self.run.config, self.run.clip.device
        batch, images = config.recipe.test_batch_size, self.selection.images.subset(range(wanted))
        batches = evaluation_batches(images, self.transform, batch, num_decoders(runtime.workers, device))
        found, alone = Predictions(), ProcessGroup(ALONE)
        with fitting_threads(self.run.clip, min(batch, wanted), "eval"), autocast(config, device):
            for pixels, _, places in to_device(batches, device, moved=(0,)):
                found.add(self.classifier(pixels), places.numpy())
        if not found.are_finite(alone):
            raise UserError(f"{config.path} gives logits that are not finite: try --precision fp32")
        return found.gather(wanted, alone)

    def map(self, place: int) -> tuple[NDArray[np.float64], float]:
        """EigenCAM [grid, grid] of one image, and the share of the patches' variance that it stands for."""
        pixels = self.transform(self.selection.images.image(place))[None].to(self.run.clip.device)
        found = image_maps(self.run.clip, pixels, self.classifier.image_plan)
        return found.maps[0].numpy(), float(found.share[0])

    def pixels(self, place: int) -> NDArray[np.uint8]:
        """An image [S, S, 3] as the model sees it, before it is normalised."""
        return np.asarray(self.transform.crop(self.selection.images.image(place)))


def _make_picture(
    sample: Sample, selection: Selection, viewers: Mapping[str, _Viewer], answers: Mapping[str, NDArray[np.int64]]
) -> Picture:
    names = [name.replace("_", " ") for name in selection.classnames]
    maps = {title: viewer.map(sample.place) for title, viewer in viewers.items()}
    return Picture(
        pixels=next(iter(viewers.values())).pixels(sample.place),
        kind=describe_kind(sample.right, list(viewers)),
        truth=names[selection.images.labels[sample.place]],
        answers={title: names[given[sample.place]] for title, given in answers.items()},
        right=dict(zip(viewers, sample.right, strict=True)),
        maps={title: grid for title, (grid, _) in maps.items()},
        shares={title: share for title, (_, share) in maps.items()},
    )


def _record_sample(
    sample: Sample, selection: Selection, picture: Picture, viewers: Mapping[str, _Viewer]
) -> dict[str, Any]:
    return {
        "place": sample.place,
        "position": int(selection.images.positions[sample.place]),
        "path": selection.images.paths[sample.place],
        "kind": picture.kind,
        "class": picture.truth,
        "answers": dict(picture.answers),
        "right": dict(picture.right),
        "eigencam": {
            title: {"share_of_variance": picture.shares[title], "map": picture.maps[title].tolist()}
            for title in viewers
        },
    }


def _load_runs(runs: Mapping[str, TrainedRun | RunConfig], runtime: RuntimeConfig) -> dict[str, TrainedRun]:
    return {title: load_trained(run, runtime) if isinstance(run, RunConfig) else run for title, run in runs.items()}


def describe_pictures(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """`caption` and `alt` of every picture in the record, by name."""
    return (_describe_samples(record) if "picks" in record else {}) | {"prompts": _describe_prompts(record["prompts"])}


def _describe_samples(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    target, maps = record["target"].partition(":")[0], record["eigencam"]
    titles = ", ".join(method["title"] for method in record["methods"])
    answers = [
        f"{pick['class']}: "
        + ", ".join(
            f"{title} right" if pick["right"][title] else f"{title} says {answer}"
            for title, answer in pick["answers"].items()
        )
        for pick in record["picks"]
    ]
    return {
        "predictions": {
            "caption": f"Predictions on {target}. Chosen: {record['pick_rule']}.",
            "alt": f"Test images with the true class and the answers of {titles}. {'. '.join(answers)}",
        },
        "eigencam": {
            "caption": f"EigenCAM of the same images: first principal component of {maps['tokens']}; {maps['sign']}; "
            f"{maps['range']}.",
            "alt": f"The same test images, each beside a map of where {titles} look, laid over it",
        },
    }


def _describe_prompts(prompts: Mapping[str, Any]) -> dict[str, str]:
    titles = ", ".join(method["title"] for method in prompts["methods"])
    return {
        "caption": f"Learned text prompts of the first layer beside random ones; {prompts['order']}.",
        "alt": "Heat maps of text prompts, a row per token and a column per dimension, at random, before and after "
        f"training: {titles}",
    }
