"""Train, evaluate and use runs from Python: `procap.train`, `procap.evaluate`, `procap.pack`, `procap.Session`.

Several runs in one session open the backbone and the data sets once:

    session = procap.Session(results="results")
    run = session.get_run(method="coop", dataset="digits", shots=4, classes="all")
    run.train()                                   # the content of train.json
    print(run.evaluate("digits").accuracy)        # and of eval/digits-all-test.json
    probabilities = run.classifier()(["new.jpg"])

`Session` and `Run` are those of `runner.session` with arguments for users; the program itself uses those.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from procap.errors import UsageError, check_names
from procap.recipe import Recipe
from procap.weights.loading import load_clip
from runner import session
from runner.acceleration import Acceleration
from runner.config import Precision, RunConfig, RuntimeConfig, Target
from runner.engine import autocast, fitting_threads
from runner.evaluate import evaluate_run
from runner.feature_store import EncodedImages
from runner.planning import RunChoices, check_read, control_options, plan_run
from runner.remote_results import results_root
from runner.results import write_bytes
from runner.run_state import RunState, read_state
from runner.setup import make_eval_transform
from runner.train import train_run
from runner.trained_runs import load_trained
from shards.default_paths import cache_home, data_root
from shards.image_selection import select_target_images
from shards.loader import evaluation_batches
from shards.manifest import Manifest
from shards.mirror import refresh
from shards.pack import check_same_source, pack_missing, pack_source
from shards.raw.guess import find_description_file
from shards.raw.user_dataset import user_source
from shards.reader import PackedDataset
from shards.transfer import upload

if TYPE_CHECKING:
    from procap.methods.method import Method
    from runner.predict import ImageClassifier
    from runner.results import EvalResult, Progress, TrainResult
    from runner.validate import Callbacks

BATCH = 100
"""Images that `features` encodes at once."""


def train(*, method: str, dataset: str, data: str | Path = "", results: str | Path = "results", **settings: Any) -> Run:
    """Train a run, resume it, or read it if it is finished.

    settings: choices of `runner.planning.RunChoices`, such as shots=4, seed=2, classes="all", options={...} or
    overrides={"epochs": 10}, and fields of `runner.config.RuntimeConfig`, such as device="cpu".
    """
    _check_settings(settings, RunChoices, RuntimeConfig)
    chosen = {field.name: settings.pop(field.name) for field in fields(RunChoices) if field.name in settings}
    run = Session(data=data, results=results, **settings).get_run(method=method, dataset=dataset, **chosen)
    run.train()
    return run


def _check_settings(settings: Iterable[str], *known: type[RunChoices | RuntimeConfig]) -> None:
    """Raise UsageError for a name that is no field of `known`."""
    for name in settings:
        if name in Recipe.model_fields:
            raise UsageError(f"{name} is part of the recipe: overrides={{'{name}': ...}}")
    check_names("setting", settings, [field.name for each in known for field in fields(each)])


def evaluate(
    run: Run | str | PathLike[str], target: str | Target, *, data: str | Path = "", force: bool = False, **settings: Any
) -> EvalResult:
    """Count the correct images of `target`, `dataset[:classes[:split]]`; an existing result is read.

    run: what `train` returns, or its folder. settings: fields of `runner.config.RuntimeConfig`; a run that `train` has
    returned takes none, because its session has them.
    """
    if isinstance(run, Run):
        if given := [*(["data"] if data else []), *settings]:
            raise UsageError(f"{', '.join(given)}: a run has the settings of its session; give its folder instead")
        return run.evaluate(target, force=force)
    return Session(data=data, **settings).find(run).evaluate(target, force=force)


def pack(folder: str | Path, *, data: str | Path = "", max_side: int | None = None) -> Manifest:
    """Pack a folder of images as `procap data pack` does; its YAML file is guessed and written if there is none.

    max_side: pixels of the shorter side that are kept, see `shards.raw.guess.find_description_file`.
    Returns the manifest: name, classes and counts. Raises UserError with all problems of the images, and
    UsageError for a name under which another folder was packed.
    """
    root = data_root(str(data))
    file, text = find_description_file(Path(folder), max_side)
    source = user_source(file, text)
    if text:
        check_same_source(source, root, file)
        write_bytes(file, text.encode())
    return pack_source(source, root)


class ImageFeatures(NamedTuple):
    """features [N, E] float32, not normalised; labels [N], indices of `classnames`; paths of the N images."""

    features: Tensor
    labels: Tensor
    classnames: tuple[str, ...]
    paths: list[str]


@torch.no_grad()
def features(
    dataset: str,
    split: str = "test",
    *,
    classes: str = "all",
    backbone: str = "mini",
    pretrained: str | None = None,
    precision: Precision = "fp32",
    **settings: Any,
) -> ImageFeatures:
    """Encode images of a packed split with the frozen tower, in list order, or read what an earlier run has stored.

    settings: those of `Session`, such as data, device or workers. Raises UserError for data or weights not here.
    """
    opened = Session(**settings)
    selection, device = select_target_images(opened.dataset(dataset), classes, split), opened.device
    images, clip = selection.images, load_clip(backbone, pretrained).to(device)
    plain, transform = Acceleration(), make_eval_transform(clip)
    plain.prepare(clip)
    # As a training on features describes its plain views.
    how = {"transform": f"{transform}, mirrored False", "precision": precision, "batch": BATCH}

    def encode() -> EncodedImages:
        start, batches = time.perf_counter(), evaluation_batches(images, transform, BATCH, opened.decoders)
        # Each batch goes to the host, because the features of a large split may not fit next to the backbone.
        parts = [clip.encode_image(upload(pixels, device)).float().cpu() for pixels, _, _ in batches]
        return EncodedImages(torch.cat(parts), {"features": time.perf_counter() - start})

    with fitting_threads(clip, BATCH, "eval"), autocast(precision, device):
        encoded, _ = opened.encode_once(clip, images, encode, acceleration=plain, **how)
    return ImageFeatures(encoded.features, torch.from_numpy(images.labels), selection.classnames, images.paths)


class Session(session.Session):
    """Where runs lie and how they are executed; the backbone, data sets and tracking store are opened once."""

    def __init__(self, *, data: str | Path = "", results: str | Path = "results", **settings: Any) -> None:
        """data, results: as the flags, also URLs. settings: fields of `runner.config.RuntimeConfig`."""
        _check_settings(settings, RuntimeConfig)
        # An earlier session may have asked the server.
        refresh.cache_clear()
        folder, url = results_root(str(results), cache_home())
        places: dict[str, Any] = {"data": data_root(str(data)), "results": folder, "results_url": url}
        super().__init__(RuntimeConfig(**places, **settings))

    def get_run(self, config: RunConfig | None = None, **choices: Any) -> Run:
        """Describe a run, which exists already or not.

        choices: of `runner.planning.RunChoices`, such as method="coop", dataset="digits", shots=4; or config.
        """
        _check_settings(choices, RunChoices)
        controls = control_options(choices.get("method", ""), choices.get("recipe", ""))
        choices["options"] = {**controls, **choices.get("options", {})}
        planned = config or plan_run(data=self.runtime.data, **choices)
        check_read([planned], choices.get("overrides", {}))
        return Run(self, planned)

    def find(self, folder: str | PathLike[str]) -> Run:
        """Return the run in `folder`."""
        located = self.locate(Path(folder))
        return Run(located.session, located.config)

    def dataset(self, name: str) -> PackedDataset:
        """Open a packed data set; generated and bundled ones are packed first."""
        pack_missing([name], self.runtime.data)
        return super().dataset(name)

    def close(self) -> None:
        """Send what is left to MLflow; the end of the program does so too."""
        self.exporter.flush()


class Run(session.Run):
    """A run of a session. config: what decides its learned tensors. folder: its files, which lie in `folder.path`."""

    def state(self, *targets: str) -> RunState:
        """Read what exists of the run and of its evaluations on `targets`, `dataset:classes:split`."""
        return read_state(self, targets)

    def train(
        self, *, force: bool = False, until: int | None = None, callbacks: Callbacks | None = None
    ) -> TrainResult | Progress:
        """Train, resume or read the run; see `runner.train.train_run`. Returns the content of `train.json`."""
        pack_missing([self.config.dataset], self.session.runtime.data)
        return train_run(self, force=force, until=until, callbacks=callbacks)

    def evaluate(self, target: str | Target, *, force: bool = False) -> EvalResult:
        """Count the correct images of a target, `dataset[:classes[:split]]`; returns the content of its result file."""
        data = self.session.runtime.data
        parsed = Target.parse(target, data) if isinstance(target, str) else target
        pack_missing([parsed.dataset], data)
        return evaluate_run(self, parsed, force=force)

    @property
    def method(self) -> Method:
        """The trained method, loaded once."""
        return load_trained(self).method

    def classifier(self, classnames: Sequence[str] = ()) -> ImageClassifier:
        """Make a function of images to probabilities; classnames: others than those that the run learned."""
        from runner.predict import ImageClassifier

        return ImageClassifier(load_trained(self), classnames)
