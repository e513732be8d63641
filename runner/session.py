"""What the runs of a command share and keep open (`Session`), and one run in it (`Run`).

A session opens each data set, the backbone, the tracking store and the results at a URL once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.acceleration import Acceleration
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target
from runner.devices import num_decoders, resolve_device
from runner.feature_store import EncodedImages, FeatureStore, feature_key, read_limit
from runner.remote_results import RemoteResults
from runner.run_folders import OtherContent, RunFolder, locate_run
from runner.tracking.exporter import Exporter
from shards.default_paths import cache_home
from shards.files import LockHeld
from shards.image_selection import TargetImages, select_target_images
from shards.manifest import MANIFEST_FILE
from shards.reader import PackedDataset, open_dataset

if TYPE_CHECKING:
    import torch

    from procap.clip import CLIP
    from procap.methods.method import Method
    from runner.backbones import Backbones
    from runner.distributed.collectives import ProcessGroup
    from runner.results import TrainResult
    from shards.kept_crops import KeptCrops
    from shards.reader import ImageList

HELD_SECONDS = 2.0
"""Time between two attempts to lock a run that another process holds."""


class Session:
    """Where and how the runs of a command are executed, and what they share; all ranks of a group have one."""

    def __init__(
        self,
        runtime: RuntimeConfig | None = None,
        group: ProcessGroup | None = None,
        backbones: Backbones | None = None,
    ) -> None:
        """group: the processes that execute each run together. backbones: of an earlier session of this process."""
        self.runtime = runtime or RuntimeConfig()
        self._datasets: dict[str, PackedDataset] = {}
        if group is not None:
            self.group = group
        if backbones is not None:
            self.backbones = backbones

    @cached_property
    def group(self) -> ProcessGroup:
        from runner.distributed.collectives import ProcessGroup

        return ProcessGroup()

    @property
    def is_first(self) -> bool:
        """Whether this process reads and writes results: rank 0, or the only one."""
        return self.group.ranks.is_first

    @cached_property
    def backbones(self) -> Backbones:
        from runner.backbones import Backbones

        return Backbones()

    @cached_property
    def device(self) -> torch.device:
        return resolve_device(self.runtime.device)

    @cached_property
    def decoders(self) -> int:
        """The number of threads that decode images."""
        return num_decoders(self.runtime.workers, self.device)

    @cached_property
    def acceleration(self) -> Acceleration:
        return Acceleration.parse(self.runtime.accelerate, self.device)

    @cached_property
    def remote(self) -> RemoteResults:
        """The results at a URL; without one, and on other ranks than the first, its methods do nothing."""
        return RemoteResults(self.runtime.results_url if self.is_first else None, self.runtime.results)

    @cached_property
    def exporter(self) -> Exporter:
        return Exporter(self.runtime.tracking_uri, self.remote)

    @cached_property
    def crops(self) -> KeptCrops:
        from shards.kept_crops import KeptCrops

        return KeptCrops()

    @cached_property
    def features(self) -> FeatureStore:
        return FeatureStore(cache_home() / "features", read_limit())

    def dataset(self, name: str) -> PackedDataset:
        """Open a packed data set once; its manifest is downloaded from a URL at the first call."""
        if name not in self._datasets:
            self._datasets[name] = open_dataset(self.runtime.data, name, remote=self.runtime.no_cache)
        return self._datasets[name]

    def encode_once(
        self, clip: CLIP, images: ImageList, encode: Callable[[], EncodedImages], **how: Any
    ) -> tuple[EncodedImages, bool]:
        """Read the features of `images`, or compute and store them by `encode`; all ranks call this.

        Returns also whether they were stored. how: of `runner.feature_store.feature_key`.
        """
        key = feature_key(clip, images, ranks=self.group.size, workers=self.decoders, **how)
        # Opened on every rank, so that a wrong limit stops all of them.
        store = self.features
        if stored := self.group.call_on_first(lambda: store.read(key)):
            return stored, True
        encoded = encode()
        if self.is_first:
            store.write(key, encoded)
        return encoded, False

    def select(self, target: Target) -> TargetImages:
        """Select all images of a target. Raises UserError unless all ranks have the same."""
        dataset = self.dataset(target.dataset)
        self.group.check_same(f"the content of {target.dataset}", dataset.manifest.digest)
        return select_target_images(dataset, target.classes, target.split)

    def check_content(self, config: RunConfig, dataset: str, digest: str) -> None:
        """Raise OtherContent if `dataset` is packed here and its digest is not `digest`, that of a result."""
        # Results can be shown where their data set is not packed.
        if dataset not in self._datasets and not (self.runtime.data / dataset / MANIFEST_FILE).exists():
            return
        if (packed := self.dataset(dataset).manifest.digest) != digest:
            raise OtherContent(
                f"{config.path} has results on other content of {dataset} ({digest}) than {self.runtime.data} has "
                f"({packed}): pack that again, repeat with --force, which replaces the result, or name other --results"
            )

    def get_run(self, config: RunConfig) -> Run:
        return Run(self, config)

    def delete_run(self, path: str) -> None:
        """Delete the run at a path below the results, at their URL and here; the caller holds its lock."""
        # The URL first: a run that was deleted here alone would come back with the next download.
        self.remote.delete_run(path)
        RunFolder(self.runtime.results / path).clear()

    def locate(self, folder: Path) -> Run:
        """Return the run in `folder`, in a session with the results that it lies in."""
        config, results = locate_run(folder)
        # A folder elsewhere is no copy of what is at the URL.
        is_here = results == self.runtime.results.resolve()
        return (self if is_here else self.elsewhere(results)).get_run(config)

    def elsewhere(self, results: Path, *, shares_backbone: bool = True, **changes: Any) -> Session:
        """Return a session on other, local results, with this one's data sets and group. changes: of its runtime."""
        runtime = replace(self.runtime, results=results, results_url=None, **changes)
        other = Session(runtime, self.group, self.backbones if shares_backbone else None)
        other._datasets = self._datasets
        return other


@dataclass(frozen=True)
class TrainedRun:
    """A finished run in memory."""

    config: RunConfig
    training: TrainResult
    clip: CLIP
    method: Method


class Run:
    """A run in a session.

    folder: its files, below the session's results. trained, temperature: what `runner.trained_runs.load_trained` and
    `runner.temperature.fit_temperature` keep for many targets.
    """

    def __init__(self, session: Session, config: RunConfig) -> None:
        self.session, self.config = session, config
        self.folder = RunFolder(session.runtime.results / config.path)
        self.trained: TrainedRun | None = None
        self.temperature: float | None = None

    @property
    def path(self) -> str:
        """The run's folder below the results."""
        return self.config.path

    @property
    def eval_settings(self) -> EvalSettings:
        """The session's settings of the evaluation, for this run."""
        return self.session.runtime.evaluation.for_run(self.config)

    def read_training(self) -> TrainResult | None:
        """Read the result of the finished training; None if there is none. Raises UserError for another run's."""
        training = self.folder.read_training()
        if training is not None:
            self.folder.check_config(self.config)
        return training

    @contextmanager
    def work(self, *, resumes: bool = True, on_held: Callable[[str], object] | None = None) -> Iterator[None]:
        """Hold the run's lock; download what it resumes from before the block, and upload and post it afterwards.

        on_held: called on all ranks, with the holder, as long as another process holds the lock; without it that raises
            LockHeld. After an error the upload is tried too, and its own error is only logged.
        """
        session = self.session
        with ExitStack() as lock:

            def try_to_lock() -> str:
                try:
                    lock.enter_context(self.folder.locked())
                except LockHeld as error:
                    return str(error)
                return ""

            while held := session.group.call_on_first(try_to_lock):
                if on_held is None:
                    raise LockHeld(held)
                on_held(held)
                time.sleep(HELD_SECONDS)
            if resumes:
                session.remote.pull(self.path, weights=True, states=True)
            try:
                try:
                    yield
                finally:
                    if session.is_first and self.folder.config_file.exists():
                        session.exporter.post_end(self.path)
            except BaseException:
                session.remote.try_push(self.path)
                raise
            session.remote.push(self.path)
