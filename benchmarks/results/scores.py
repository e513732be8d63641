"""The numbers that tables and figures are made of, read from the result files of finished runs alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from procap.errors import UserError
from procap.methods import METHODS
from runner.config import RunConfig, Target
from runner.results import EvalResult, RunFolder, TrainResult, find_runs, harmonic_mean

TITLES: Mapping[str, str] = {
    "zeroshot": "CLIP (zero-shot)",
    "coop": "CoOp",
    "cocoop": "CoCoOp",
    "maple": "MaPLe",
    "procap": "ProCAP",
}


@dataclass(frozen=True)
class Score:
    """One evaluation of a finished run."""

    config: RunConfig
    target: Target
    result: EvalResult
    training: TrainResult

    @property
    def accuracy(self) -> float:
        """Percent, from the integer counts."""
        return 100.0 * self.result.correct / self.result.total


@dataclass(frozen=True)
class Cell:
    """A percentage: `values`, one for each of `seeds`, and what stands for them all."""

    mean: float
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    limited: bool = False

    @property
    def std(self) -> float | None:
        """The sample standard deviation (ddof = 1), None for one seed."""
        return stdev(self.values) if len(self.values) > 1 else None


def run_folders(results: Path) -> list[tuple[RunFolder, RunConfig]]:
    """The runs below `results` that lie where their configuration says; a tracker's copies of them are no runs."""
    found = []
    for folder in find_runs(results) if results.is_dir() else []:
        config = folder.config()
        if config is not None and folder.path.resolve().as_posix().endswith(f"/{config.path}"):
            found.append((folder, config))
    return found


def read_scores(results: Path, wanted: Callable[[RunConfig], bool] = lambda config: True) -> list[Score]:
    """Every evaluation of every finished run that is `wanted`.

    Raises UserError when `results` is no folder, and for an evaluation that is not of the run's own weights.
    """
    if not results.is_dir():
        raise UserError(f"no results folder at {results}; name one with --results, or make one with `procap demo`")
    scores = []
    for folder, config in run_folders(results):
        training = folder.train() if wanted(config) else None
        for result in folder.evaluations() if training else []:
            assert training is not None
            scores.append(score_of(folder, config, training, result))
    return scores


def score_of(folder: RunFolder, config: RunConfig, training: TrainResult, result: EvalResult) -> Score:
    """Raises UserError for an evaluation that is not of the run's own weights."""
    if (result.config_hash, result.checkpoint_sha256) != (config.hash, training.checkpoint_sha256):
        raise UserError(
            f"{folder.path} was evaluated on {result.target} with other weights than it holds now; "
            f"repeat it: procap eval {folder.path} --targets {result.target} --force"
        )
    return Score(config, Target.recorded(result.target), result, training)


def is_half(score: Score) -> bool:
    """Whether it is of the base or novel test images of the data set on whose base classes the run was trained."""
    own = score.target.dataset == score.config.dataset and score.target.split == "test"
    return own and score.config.classes == "base" and score.target.classes in ("base", "novel")


def over_seeds(values: Mapping[int, float], *, limited: bool = False) -> Cell | None:
    """The mean of one value per seed; None without any."""
    if not values:
        return None
    numbers = tuple(values[seed] for seed in sorted(values))
    return Cell(fmean(numbers), numbers, tuple(sorted(values)), limited)


def hm_of(base: Cell | None, novel: Cell | None) -> Cell | None:
    """The harmonic mean of the mean base and the mean novel accuracy; its `values` are those of the single seeds.

    None where one is missing or where they are not of the same seeds and the same kind.
    """
    if not base or not novel or (base.seeds, base.limited) != (novel.seeds, novel.limited):
        return None
    values = tuple(harmonic_mean(b, n) for b, n in zip(base.values, novel.values, strict=True))
    return Cell(harmonic_mean(base.mean, novel.mean), values, base.seeds, base.limited)


def average(cells: Sequence[Cell | None]) -> Cell | None:
    """The mean over data sets, seed by seed; None where a cell is missing or is of other seeds or another kind."""
    there = [cell for cell in cells if cell is not None]
    if len(there) < len(cells) or len({(cell.seeds, cell.limited) for cell in there}) != 1:
        return None
    values = tuple(fmean(column) for column in zip(*(cell.values for cell in there), strict=True))
    return Cell(fmean(cell.mean for cell in there), values, there[0].seeds, there[0].limited)


def cell_of(scores: Iterable[Score]) -> Cell | None:
    """The accuracy of scores of one target, one per seed. Limited ones count only where no whole one is there."""
    every = list(scores)
    whole = [score for score in every if not score.result.limited]
    return over_seeds(
        {score.config.seed: score.accuracy for score in whole or every}, limited=bool(every) and not whole
    )


def images_per_second(scores: Iterable[Score], *, model_only: bool = False) -> float | None:
    """Images over seconds of several evaluations together, decoding included unless `model_only`."""
    images = seconds = 0.0
    for score in scores:
        rate = score.result.images_per_second_model if model_only else score.result.images_per_second
        if rate:
            images += score.result.total
            seconds += score.result.total / rate
    return images / seconds if seconds else None


def timed(scores: Iterable[Score]) -> bool:
    """Whether each has a speed, which it has not where image features came from the cache."""
    return all(score.result.images_per_second for score in scores)


def describe_variant(config: RunConfig) -> dict[str, str]:
    """What sets a run apart from other runs, method, data set and seed aside; nothing that it never reads.

    A dotted name is a field of the recipe or an option of the method. Colour jitter and rotation follow the data set.
    """
    facts = {
        "backbone": config.backbone,
        "pretrained": config.pretrained or "default",
        "precision": config.precision,
        "classes": config.classes,
    }
    facts |= {f"{config.method}.{name}": json.dumps(value) for name, value in sorted(config.options.items())}
    if config.recipe.epochs:
        facts |= {"shots": str(config.shots or "full"), "recipe": config.recipe_name}
        facts["picks"] = "imported" if config.picks else "drawn"
        if config.recipe_name == "custom":
            kept = set(config.identity()["recipe"]) - {"colour_jitter", "rotation"}
            facts |= {f"recipe.{name}": str(getattr(config.recipe, name)) for name in sorted(kept)}
    return facts


def labels(variants: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """A title for each (method, variant), which names only what distinguishes it.

    What makes results incomparable (backbone, shots, ...) is named as soon as it differs anywhere in the table, a field
    of the recipe or of the method when it differs between variants of that method.
    """
    titles = []
    for method, facts in variants:
        own = []
        for name, value in facts.items():
            rivals = [other for rival, other in variants if "." not in name or rival == method]
            if len({other[name] for other in rivals if name in other}) > 1:
                own.append(f"{name.rpartition('.')[2]} {value}")
        titles.append(TITLES.get(method, method) + (f" ({', '.join(own)})" if own else ""))
    return titles


def method_order(method: str) -> tuple[int, str]:
    """Sort key: the order of METHODS, then plug-ins by name."""
    return listed(method, METHODS)


def listed(name: str, known: Iterable[str]) -> tuple[int, str]:
    """Sort key: the order of `known`, then the others by name."""
    order = list(known)
    return (order.index(name) if name in order else len(order), name)


def dataset_order(dataset: str) -> tuple[float, str]:
    """Sort key: the order of the catalogue, derived sets after the one they come from, own ones at the end."""
    from shards.catalogue import CATALOGUE
    from shards.resolve import base_name

    known, base = list(CATALOGUE), base_name(dataset)
    return (known.index(base) if base in known else math.inf, "" if dataset == base else dataset)


def variants_of(scores: Iterable[Score]) -> dict[str, str]:
    """How data sets among those trained on and tested on differ from published ones, by name; the others are left out.

    What a result recorded of its images counts; for data sets that were only trained on, what their name says.
    """
    from shards.resolve import variant_of_name

    found: dict[str, str] = {}
    for score in scores:
        for name in (score.config.dataset, score.target.dataset):
            if name not in found:
                found[name] = variant_of_name(name)
        if score.result.variant:
            found[score.target.dataset] = score.result.variant
    return {name: words for name, words in sorted(found.items(), key=lambda item: dataset_order(item[0])) if words}
