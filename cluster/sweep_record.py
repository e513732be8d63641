"""What a sweep leaves behind beside its runs: what was asked for, and what became of every configuration.

<results>/sweeps/<name>/sweep.json  trials/<digest>.json  summary.json  .lock
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.space import Dimension, Space, dimension
from procap.errors import UsageError, UserError
from runner.collection import COLLECTION_NAME
from runner.results import read_document, write_json
from shards.locks import LockHeld, file_lock, owner_name

SWEEPS = "sweeps"
REPAIR = "move it away and type the sweep again, its runs are kept"

Metric = Literal["val", "held-out"]
Searcher = Literal["grid", "random", "tpe"]
State = Literal["running", "finished", "stopped", "failed"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SweepSettings(_Record):
    """`sweep.json`: what is searched, and how far."""

    schema_version: Literal[1] = Field(default=1, validation_alias="schema", serialization_alias="schema")
    name: str = Field(pattern=COLLECTION_NAME)
    space: dict[str, Any] = Field(description="fields and what they may be; nothing where only seeds are compared")
    methods: tuple[str, ...] = Field(description="of which each is a configuration of its own where there are several")
    datasets: tuple[str, ...] = Field(description="over which a configuration's figure is the mean, unless varied")
    seeds: tuple[int, ...] = Field(description="likewise")
    metric: Metric = "val"
    direction: Literal["max", "min"] = "max"
    search: Searcher = "grid"
    search_seed: int = 0
    classes: Literal["base", "all"] = "base"
    shots: int = 16
    backbone: str = "mini"
    pretrained: str | None = None
    precision: str = "fp32"
    recipe: str = "published"
    overrides: dict[str, Any] = Field(default_factory=dict, description="of fields of the recipe, that all runs have")
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="by method")
    picks: str = ""
    stop: Literal["none", "asha"] = "none"
    grace: int = Field(default=1, ge=1, description="epochs before a configuration may be stopped")
    reduction: int = Field(default=3, ge=2, description="of so many that get to a rung, one goes on")
    trials: int | None = Field(default=None, ge=1, description="configurations in all")
    hours: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="of this attempt")

    def dimensions(self) -> tuple[Dimension, ...]:
        given = [dimension(field, plain, self.methods) for field, plain in self.space.items()]
        several = [dimension("method", list(self.methods), self.methods)] if len(self.methods) > 1 else []
        return (*several, *given)

    def searched(self) -> Space:
        return Space(self.dimensions())

    @property
    def together(self) -> bool:
        """Whether all runs of a configuration are one job, as their mean has to be known before others begin."""
        return self.search == "tpe" or self.stop == "asha"

    @property
    def varies_data(self) -> bool:
        """Whether data sets are varied, so that configurations compare on the same one alone."""
        return "dataset" in self.space

    def differing(self, other: SweepSettings) -> dict[str, tuple[Any, Any]]:
        """The fields that make the two search for different things, with the value of each."""
        free = {"stop", "grace", "reduction", "trials", "hours"}
        mine, others = self.model_dump(mode="json"), other.model_dump(mode="json")
        return {name: (mine[name], others[name]) for name in mine if name not in free and mine[name] != others[name]}


class TrialRecord(_Record):
    """`trials/<digest>.json`: a configuration, from when it is chosen.

    A stopped one was ended by early stopping, which keeps the states of its runs; one that is still running when nobody
    works on it was left unfinished.
    """

    schema_version: Literal[1] = Field(default=1, validation_alias="schema", serialization_alias="schema")
    number: int = Field(description="in order of choice, from 0")
    values: dict[str, Any]
    runs: tuple[str, ...] = Field(default=(), description="their paths below the results")
    state: State = "running"
    figures: dict[str, float] = Field(default_factory=dict, description="of each run, in percent")
    figure: float | None = Field(default=None, description="the mean over the runs")
    curve: dict[int, float] = Field(default_factory=dict, description="that mean by epoch, 1-based, where it was told")
    epochs: int = Field(default=0, description="that its runs have in all")
    why: str = Field(default="", description="of a failure, the first one where several runs failed")
    failures: dict[str, str] = Field(default_factory=dict, description="why, of each run that failed")

    @property
    def epoch(self) -> int:
        """The last epoch that all its runs are known to have reached."""
        return self.epochs if self.state == "finished" else max(self.curve, default=0)

    def by_seed(self) -> dict[str, float]:
        """The figure of each seed, a mean over data sets."""
        seeds: dict[str, list[float]] = {}
        for run, figure in self.figures.items():
            seeds.setdefault(seed_of(run), []).append(figure)
        return {seed: fmean(figures) for seed, figures in seeds.items()}

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None of fewer than two."""
        figures = list(self.by_seed().values())
        return stdev(figures) if len(figures) > 1 else None


def seed_of(run: str) -> str:
    """The seed in a run's path, which ends in seed1-3fa29c10."""
    return run.rpartition("/seed")[2].partition("-")[0]


@dataclass(frozen=True)
class SweepFolder:
    """The files of one sweep; reading never creates anything."""

    path: Path

    @classmethod
    def of(cls, results: Path, name: str) -> SweepFolder:
        return cls(results / SWEEPS / name)

    @property
    def settings_file(self) -> Path:
        return self.path / "sweep.json"

    def trial_file(self, digest: str) -> Path:
        return self.path / "trials" / f"{digest}.json"

    def settings(self) -> SweepSettings | None:
        return read_document(self.settings_file, SweepSettings, REPAIR)

    def trials(self) -> dict[str, TrialRecord]:
        """What is known of every configuration, by digest, in the order they were chosen in."""
        files = (self.path / "trials").glob("[!.]*.json")
        found = {file.stem: read_document(file, TrialRecord, REPAIR) for file in files}
        known = {digest: record for digest, record in found.items() if record is not None}
        return dict(sorted(known.items(), key=lambda item: item[1].number))

    def check(self, settings: SweepSettings) -> None:
        """Raises UsageError where the sweep of this name searched for something else; it says what differs."""
        before = self.settings()
        if before is not None and (differing := settings.differing(before)):
            shown = "; ".join(f"{name} was {then}, is now {now}" for name, (now, then) in differing.items())
            raise UsageError(
                f"the sweep '{settings.name}' searched for something else: {shown}; give this one another --name, or "
                f"take the settings of {self.settings_file}"
            )

    def write(self, settings: SweepSettings) -> None:
        write_json(self.settings_file, settings)

    def write_trial(self, digest: str, record: TrialRecord) -> None:
        write_json(self.trial_file(digest), record)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the sweep against other processes. Raises UserError, which names the holder, when it is held."""
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self.path / ".lock", timeout=0))
            except LockHeld as error:
                raise held(self.path.name, error.owner) from None
            except OSError as error:
                reason = error.strerror or error
                raise UserError(f"cannot write to {self.path}: {reason}; name another --results") from error
            yield


@contextmanager
def held_on_cluster(name: str, results: str) -> Iterator[None]:
    """Hold the sweep on the whole cluster, also where the locks of a shared folder stay on one machine.

    An actor has the sweep's name; it ends with its driver. Raises UserError when there is one already.
    """
    import ray

    class Holder:
        def __init__(self, who: str) -> None:
            self._who = who

        def who(self) -> str:
            return self._who

    key = f"sweep:{name}:{hashlib.sha256(results.encode()).hexdigest()[:12]}"
    try:
        actor: Any = ray.remote(Holder).options(name=key, num_cpus=0).remote(owner_name())
    except ValueError:
        owner: Any = ""
        with suppress(Exception):
            owner = ray.get(ray.get_actor(key).who.remote(), timeout=10)
        raise held(name, owner) from None
    try:
        yield
    finally:
        with suppress(Exception):
            ray.kill(actor)


def held(name: str, owner: str) -> UserError:
    return UserError(
        f"the sweep '{name}' is being carried out by another process ({owner or 'unknown'}); wait for it, stop it, or "
        "give this one another --name"
    )


def ordered(records: Mapping[str, TrialRecord], direction: str) -> list[tuple[str, TrialRecord]]:
    """Configurations, the best first: finished ones by figure, then those that got less far, failed ones last."""
    rank = {"finished": 0, "stopped": 1, "running": 2, "failed": 3}
    sign = -1 if direction == "max" else 1

    def key(item: tuple[str, TrialRecord]) -> tuple[float, ...]:
        record = item[1]
        figure = float("inf") if record.figure is None else sign * record.figure
        reached = 0 if record.state == "finished" else -record.epoch
        return (rank[record.state], reached, figure, record.number)

    return sorted(records.items(), key=key)


def best(settings: SweepSettings, records: Mapping[str, TrialRecord]) -> tuple[str, TrialRecord] | None:
    """The best finished configuration, None while there is none, and where data sets are varied: none is the best, as
    figures of different images do not compare."""
    return None if settings.varies_data else _foremost(records, settings.direction)


def best_of_each(settings: SweepSettings, records: Mapping[str, TrialRecord]) -> dict[str, tuple[str, TrialRecord]]:
    """The best finished configuration of each data set where they are varied, else of each method."""
    field, names = ("dataset", settings.datasets) if settings.varies_data else ("method", settings.methods)
    found = {}
    for name in names:
        own = {digest: record for digest, record in records.items() if record.values.get(field, names[0]) == name}
        if (first := _foremost(own, settings.direction)) is not None:
            found[name] = first
    return found


def _foremost(records: Mapping[str, TrialRecord], direction: str) -> tuple[str, TrialRecord] | None:
    first = next(iter(ordered(records, direction)), None)
    return first if first and first[1].state == "finished" and first[1].figure is not None else None
