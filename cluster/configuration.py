"""From the values of a configuration to its runs: the same runs that `procap train` makes of these values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.job import RunSpec
from cluster.space import Values, digest_of
from cluster.sweep_record import Metric, SweepSettings
from procap.errors import UsageError
from runner.config import plan_run

METRICS: Mapping[Metric, str] = {
    "val": "accuracy on the validation images of the classes that are trained on",
    "held-out": "harmonic mean over the two halves of the base half, of which one is trained on",
}


MOST_CHECKED = 1000
"""Configurations of a grid that are looked at before it starts."""
MOST_TRIED = 20


@dataclass(frozen=True)
class Configuration:
    """Values and the runs that they stand for, seeds innermost."""

    values: Values
    pieces: tuple[RunSpec, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.values)

    @property
    def epochs(self) -> int:
        return max(piece.config.recipe.epochs for piece in self.pieces)

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.config.path for piece in self.pieces))


def configure(settings: SweepSettings, values: Values, data: Path | None) -> Configuration:
    """The runs of `values`. Raises UsageError or DataUsageError for values that a run refuses."""
    run: dict[str, Any] = {
        "shots": settings.shots,
        "backbone": settings.backbone,
        "pretrained": settings.pretrained,
        "precision": settings.precision,
        "recipe": settings.recipe,
        "method": settings.methods[0],
    }
    overrides = dict(settings.overrides)
    options: dict[str, Any] = {}
    for field, value in values.items():
        group, dot, name = field.partition(".")
        if dot:
            {"recipe": overrides, "options": options}[group][name] = value
        else:
            run[field] = value
    datasets = (run.pop("dataset"),) if "dataset" in run else settings.datasets
    classes = "dev-base" if settings.metric == "held-out" else settings.classes
    for name in ("method", "backbone", "precision", "recipe"):
        if not isinstance(run[name], str):
            raise UsageError(f"{name} = {run[name]!r} is not a name")
    options = {**settings.options.get(run["method"], {}), **options}
    pieces = []
    for dataset in datasets:
        for seed in settings.seeds:
            config = plan_run(
                dataset=dataset,
                classes=classes,
                seed=seed,
                overrides=overrides,
                options=options,
                picks=settings.picks,
                data=data,
                **run,
            )
            pieces.append(RunSpec(config=config, targets=targets(config.dataset, classes)))
    return Configuration(values, tuple(pieces))


def check_values(settings: SweepSettings, data: Path | None) -> None:
    """Raises UsageError for early stopping that could stop nothing, and for values that runs refuse: any configuration
    of a grid, and of other searches a value that fits with none of the others, or ranges of which nothing can be run.
    """
    if settings.search == "grid":
        for values in itertools.islice(settings.searched().grid(), MOST_CHECKED):
            configure(settings, values, data)
    else:
        _check_drawn(settings, data)
    if settings.stop == "asha" and (epochs := most_epochs(settings, data)) <= settings.grace:
        raise UsageError(
            f"--stop asha decides after epoch {settings.grace} at the earliest, and runs have {epochs}: "
            "give a smaller --grace or more --epochs"
        )


def _check_drawn(settings: SweepSettings, data: Path | None) -> None:
    space = settings.searched()
    drawn = list(itertools.islice(space.draws(settings.search_seed), MOST_TRIED))
    if refusal := _all_refused(settings, drawn, data):
        whole = "; whole numbers are drawn by integers(1, 4)" if "integer" in str(refusal) else ""
        raise UsageError(f"of {len(drawn)} configurations that were drawn none can be run: {refusal}{whole}")
    for one in space.dimensions:
        for value in one.values:
            if refusal := _all_refused(settings, ({**values, one.field: value} for values in drawn), data):
                raise refusal


def _all_refused(settings: SweepSettings, tried: Iterable[Values], data: Path | None) -> UsageError | None:
    """Why the first of them cannot be run, if none can; looks no further than the first that can."""
    first: UsageError | None = None
    for values in tried:
        try:
            configure(settings, values, data)
        except UsageError as error:
            first = first or error
        else:
            return None
    return first


def most_epochs(settings: SweepSettings, data: Path | None) -> int:
    """That the runs of any method have."""
    values = next(settings.searched().draws(settings.search_seed))
    each = [{**values, "method": method} for method in settings.methods]
    return max(configure(settings, one, data).epochs for one in each)


def targets(dataset: str, classes: str) -> tuple[str, ...]:
    """What a run is chosen by; never a test split."""
    halves = ("dev-base", "dev-novel") if classes == "dev-base" else (classes,)
    return tuple(f"{dataset}:{half}:val" for half in halves)


def check_data(datasets: tuple[str, ...], data: Path | None) -> None:
    """Raises UsageError for a data set without validation images."""
    from shards.resolve import known

    for name in datasets:
        dataset = known(name, data)
        if "val" not in dataset.counts:
            raise UsageError(
                f"{dataset.name} has no validation images, and a sweep never chooses by test images: search on a data "
                "set that has some"
            )
