"""The experiments of the paper as lists of runs, and the worlds of data that they can be done in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.job import Piece
from procap.errors import unknown_name
from runner.config import RunConfig, Target, plan_run


@dataclass(frozen=True)
class World:
    """Data sets that belong together, the backbone that is theirs, and how long methods are trained on them.

    recipe, changes, rates: as `plan_run` takes them; rates are learning rates by method. quick: further changes, for a
    look at whether everything works.
    """

    name: str
    datasets: tuple[str, ...]
    backbone: str
    pretrained: str | None = None
    precision: str = "fp32"
    recipe: str = "own"
    changes: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)


PAPER = World(
    "paper",
    (
        "imagenet",
        "caltech101",
        "oxford-pets",
        "stanford-cars",
        "oxford-flowers",
        "food101",
        "fgvc-aircraft",
        "sun397",
        "dtd",
        "eurosat",
        "ucf101",
    ),
    backbone="ViT-B/16",
    pretrained="openai",
    precision="bf16",
)
# The rates of `procap demo`, which says how they were found.
MINI = World(
    "mini",
    ("shapes", "coloured-shapes", "textures", "petals", "tiles", "glyphs", "digits"),
    backbone="mini",
    recipe="procap",
    changes={"epochs": 10, "batch_size": 16, "warmup_epochs": 1},
    rates={"coop": 4e-2, "maple": 1e-2, "procap": 3.90625e-5},
    quick={"epochs": 2},
)
WORLDS = {world.name: world for world in (PAPER, MINI)}


@dataclass(frozen=True)
class Choice:
    """What a person may choose of any suite."""

    world: World
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    recipe: str = ""
    quick: bool = False
    backbone: str = ""
    pretrained: str | None = None
    precision: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None

    def run(self, method: str, dataset: str, seed: int, **more: Any) -> RunConfig:
        """The run of one method on one data set, as the world wants it."""
        world = self.world
        changes = {**world.changes, **(world.quick if self.quick else {})}
        changes |= {"lr": world.rates[method]} if method in world.rates else {}
        return plan_run(
            method=method,
            dataset=dataset,
            seed=seed,
            backbone=self.backbone or world.backbone,
            pretrained=self.pretrained if self.backbone else world.pretrained,
            precision=self.precision or world.precision,
            recipe=self.recipe or world.recipe,
            overrides={**changes, **self.overrides},
            data=self.data,
            **more,
        )


@dataclass(frozen=True)
class Suite:
    """An experiment: what is run and where it is evaluated, for whatever was chosen."""

    name: str
    title: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    pieces: Callable[[Choice], Sequence[Piece]]


def base_to_novel(choice: Choice) -> list[Piece]:
    """Train on the base classes with 16 shots, test on base and on novel classes."""
    return [
        Piece(
            config=choice.run(method, dataset, seed, classes="base", shots=16),
            targets=tuple(str(Target(dataset, half)) for half in ("base", "novel")),
        )
        for dataset in choice.datasets
        for method in choice.methods
        for seed in choice.seeds
    ]


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "base-to-novel",
            "base-to-novel generalisation (Table 1 of the paper)",
            methods=("zeroshot", "coop", "cocoop", "maple", "procap"),
            seeds=(1, 2, 3),
            pieces=base_to_novel,
        ),
    )
}


def suite_named(name: str) -> Suite:
    """Raises UsageError with the nearest known name."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]


def world_named(name: str) -> World:
    """Raises UsageError with the nearest known name."""
    if name not in WORLDS:
        raise unknown_name("world", name, WORLDS)
    return WORLDS[name]
