"""Store the settings and configurations of a sweep in one file, and build the runs of a configuration."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.space import RUN_FIELDS, Domain, Values, round_value, value_between
from cluster.trial import validation_targets
from procap.errors import UsageError, UserError
from runner.config import Count, FrozenModel, RuntimeConfig
from runner.planning import check_read, control_options, plan_run
from runner.results import MaskedText, read_document, write_json
from runner.run_collection import COLLECTION_NAME
from runner.run_folders import RunFolder
from runner.run_state import RunSpec, final_score
from runner.session import Session
from shards.uneven_samples import BALANCED, Sampling

SWEEPS = "sweeps"
CHANGEABLE = ("scheduler", "grace_period", "reduction_factor", "trials", "hours")
"""Settings that may change when a sweep is continued: none of them changes the score of a finished configuration."""

Metric = Literal["val", "held-out"]
Search = Literal["grid", "random", "tpe"]
State = Literal["finished", "stopped", "unfinished", "failed"]
"""The states of a configuration, the best first: `stopped` by the scheduler, the others as of runs."""
METRICS: Mapping[Metric, str] = {
    "val": "accuracy on the validation images of the classes that are trained on",
    "held-out": "harmonic mean over the two halves of the base half, of which one is trained on",
}


class SweepSettings(FrozenModel):
    """What is searched, how, and how far."""

    name: str = Field(pattern=COLLECTION_NAME)
    space: dict[str, Domain] = Field(description="domain of each field; empty: methods and seeds only")
    methods: tuple[str, ...] = Field(description="one configuration each")
    datasets: tuple[str, ...] = Field(description="averaged over")
    seeds: tuple[int, ...] = Field(description="averaged over")
    metric: Metric = "val"
    search: Search = "grid"
    search_seed: int = 0
    classes: Literal["base", "all"] = "base"
    shots: int = 16
    sampling: Sampling = BALANCED
    backbone: str = "mini"
    pretrained: str | None = None
    precision: str = "fp32"
    recipe: str = "published"
    overrides: dict[str, Any] = Field(default_factory=dict, description="recipe fields of all runs")
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="by method")
    scheduler: Literal["none", "asha"] = "none"
    grace_period: int = Field(default=1, ge=1, description="epochs before ASHA may stop a configuration")
    reduction_factor: int = Field(default=3, ge=2, description="of so many that reach a rung ASHA continues one")
    trials: int | None = Field(default=None, ge=1, description="configurations in all")
    hours: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="of this attempt")

    @property
    def domains(self) -> dict[str, Domain]:
        """The domain of every varied field, with `method` added if there are several methods."""
        return ({"method": list(self.methods)} if len(self.methods) > 1 else {}) | self.space

    @property
    def size(self) -> int | None:
        """Number of configurations, None without a limit."""
        # Without domains the product is 1: the configuration of the given values.
        return math.prod(map(len, self.domains.values())) if self.search == "grid" else self.trials

    def values_of_trial(self, drawn: Mapping[str, Any]) -> Values:
        """Return the values of the varied fields as plain Python, rounded as `round_value` does."""
        return {field: round_value(domain, drawn[field]) for field, domain in self.domains.items()}

    def runs_of_trial(self, drawn: Mapping[str, Any], runtime: RuntimeConfig) -> list[RunSpec]:
        """Build the runs of a trial."""
        return make_runs(self, self.values_of_trial(drawn), runtime.data)


Percent = Annotated[float, Field(ge=0, le=100)]
RunPath = Annotated[str, Field(pattern="/seed[0-9]{1,10}-[0-9a-f]{8}$", description="of a run below the results")]


class Configuration(FrozenModel):
    """Values of the varied fields, and the outcome of the runs with these values."""

    values: Values
    runs: tuple[RunPath, ...] = ()
    state: State = "unfinished"
    scores: dict[RunPath, Percent] = Field(default_factory=dict, description="of each run")
    curve: dict[Count, Percent] = Field(default_factory=dict, description="mean over runs by 1-based epoch, with ASHA")
    epochs: Count = Field(default=0, description="of its runs in all")
    error: MaskedText = Field(default="", description="why it failed")

    @property
    def score(self) -> float | None:
        """The mean over the runs, or the last value of the curve if ASHA has stopped them; None before."""
        if self.state == "stopped":
            return self.curve[max(self.curve)] if self.curve else None
        return fmean(self.scores.values()) if self.state == "finished" and self.scores else None

    @property
    def epoch(self) -> int:
        """The last epoch that all runs are known to have finished."""
        return self.epochs if self.state == "finished" else max(self.curve, default=0)

    @property
    def by_seed(self) -> dict[str, float]:
        """The score of each seed, a mean over data sets."""
        seeds = dict.fromkeys(map(seed_of, self.scores))
        return {seed: fmean(score for run, score in self.scores.items() if seed_of(run) == seed) for seed in seeds}

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, None for fewer than two."""
        scores = list(self.by_seed.values())
        return stdev(scores) if len(scores) > 1 else None


class SweepRecord(FrozenModel):
    """`<results>/sweeps/<name>/sweep.json`: the settings, and the configurations in order of their start."""

    schema_version: Literal[3] = Field(default=3, validation_alias="schema", serialization_alias="schema")
    settings: SweepSettings
    configurations: list[Configuration] = Field(default_factory=list)


def seed_of(path: str) -> str:
    """Return the seed in a run's path, which ends in e.g. seed1-3fa29c10."""
    return path.rpartition("/seed")[2].partition("-")[0]


def key_of(values: Mapping[str, Any]) -> str:
    """Identify the values of a configuration, independent of their order."""
    return json.dumps(values, sort_keys=True)


@dataclass(frozen=True)
class SweepFolder:
    """Read and write the files of one sweep; reading never creates anything."""

    path: Path

    def load(self) -> SweepRecord | None:
        """Load the record, None before the first command of the sweep."""
        repair = "move it away and repeat the sweep, its runs are kept"
        return read_document(self.path / "sweep.json", SweepRecord, repair)

    def save(self, settings: SweepSettings, configurations: Iterable[Configuration] = ()) -> None:
        write_json(self.path / "sweep.json", SweepRecord(settings=settings, configurations=list(configurations)))

    def load_configurations(self, settings: SweepSettings) -> list[Configuration]:
        """Load the configurations of earlier commands. Raises UsageError if settings of this name differ."""
        if (record := self.load()) is None:
            return []
        old, new = record.settings.model_dump(mode="json"), settings.model_dump(mode="json")
        differing = [name for name in new if name not in CHANGEABLE and new[name] != old[name]]
        if differing:
            shown = "; ".join(f"{name} was {old[name]}, is now {new[name]}" for name in differing)
            raise UsageError(f"the sweep '{settings.name}' has different settings: {shown}; use another --name")
        return record.configurations


def make_runs(settings: SweepSettings, values: Values, data: Path | None) -> list[RunSpec]:
    """Build the runs of a configuration, as `procap train` does of its values. Raises UsageError for invalid values."""
    run: dict[str, Any] = settings.model_dump(include={*RUN_FIELDS, "sampling"})
    run["method"] = settings.methods[0]
    overrides, options = dict[str, Any](), dict[str, Any]()
    for field, value in values.items():
        group, dot, name = field.partition(".")
        if dot:
            {"recipe": overrides, "options": options}[group][name] = value
        else:
            # Values are parsed as JSON: `shots` is a number, `pretrained` may be null, and the rest are names.
            run[field] = value if field in ("shots", "pretrained") else str(value)
    controls = control_options(run["method"], run["recipe"])
    # The last one wins: varied values replace those of --option, and these the controls.
    run["options"] = {**controls, **settings.options.get(run["method"], {}), **options}
    # Targets are validation images only; held-out selection trains on half of the base classes.
    classes = "dev-base" if settings.metric == "held-out" else settings.classes
    run["overrides"] = {**settings.overrides, **overrides}
    # In the recipe of the classes that are trained on in the end.
    task = "few-shot" if settings.classes == "all" else None
    configs = [
        plan_run(dataset=dataset, classes=classes, seed=seed, task=task, data=data, **run)
        for dataset, seed in itertools.product(settings.datasets, settings.seeds)
    ]
    check_read(configs, overrides)
    return [RunSpec(config=config, targets=validation_targets(config.dataset, classes)) for config in configs]


def read_scores(stored: Configuration, session: Session) -> Configuration:
    """Return a configuration with the scores that the results of its finished runs have now."""
    scores = dict(stored.scores)
    for path in scores if stored.state == "finished" else ():
        with suppress(UserError):
            if config := RunFolder(session.runtime.results / path).read_config():
                targets = validation_targets(config.dataset, config.classes)
                score = final_score(session.get_run(config), targets, any_code=True)
                scores[path] = scores[path] if score is None else score
    return stored.model_copy(update={"scores": scores})


def examples(settings: SweepSettings) -> list[Values]:
    """List some configurations, in which every listed value occurs."""
    domains = settings.domains
    lists = [domain if isinstance(domain, list) else [value_between(domain)] for domain in domains.values()]
    count = max(map(len, lists), default=1)
    return [
        {field: values[i % len(values)] for field, values in zip(domains, lists, strict=True)} for i in range(count)
    ]
