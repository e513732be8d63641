"""Define profiles: the data sets, backbone and recipes of the paper, and those of generated data without a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experiment.published import DATASETS
from procap.errors import check_names


@dataclass(frozen=True)
class Profile:
    """Data sets, their backbone, and how long methods are trained on them.

    recipe, overrides, rates, options: as `plan_run` takes them; rates and options are by method. quick: more overrides,
    for a smoke test. general: the data set used as ImageNet, and shifts: its shifted test sets.
    """

    name: str
    datasets: tuple[str, ...]
    backbone: str
    general: str
    shifts: tuple[str, ...]
    pretrained: str | None = None
    precision: str = "fp32"
    recipe: str = "published"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)


# The catalogue lists the paper's eleven data sets first, and then ImageNet's shifts.
PAPER = Profile(
    "paper",
    tuple(DATASETS)[:11],
    backbone="ViT-B/16",
    general="imagenet",
    shifts=tuple(DATASETS)[11:],
    pretrained="openai",
    precision="bf16",
    quick={"epochs": 2, "warmup_epochs": 1},
)
# Learning rates for short trainings, chosen on base validation images; docs/methods.md has the command.
MINI = Profile(
    "mini",
    ("shapes", "coloured-shapes", "textures", "petals", "tiles", "glyphs", "digits"),
    backbone="mini",
    general="shapes",
    shifts=("shapes-v2", "shapes-sketch", "shapes-hard", "shapes-art"),
    recipe="procap",
    overrides={"epochs": 10, "batch_size": 16, "warmup_epochs": 1},
    rates={
        "coop": 4e-2,
        "cocoop": 1e-2,
        "kgcoop": 4e-2,
        "vpt": 2.5e-3,
        "ivlp": 2.5e-3,
        "maple": 1e-2,
        "promptsrc": 1e-2,
        "coprompt": 1e-2,
        "tcp": 2.5e-3,
        "mma": 0.16,
        "mmrl": 2.5e-3,
        "prograd": 6e-4,
        "bpl": 0.16,
        "dept": 2.5e-3,
        "dept-maple": 4e-2,
        "kdpl": 4e-2,
        "kdpl-maple": 1e-2,
        "dpc": 1e-2,
        "aapl": 2.5e-3,
        "rebapl": 4e-2,
        "mmrlpp": 2.5e-3,
        "2sfs": 3e-3,
        "cliplora": 1e-2,
        "skipt": 1e-4,
        "mmlop": 1e-2,
        "procap": 3.90625e-5,
    },
    # No language model has written sentences about generated data, and no larger CLIP knows them.
    options={"coprompt": {"sentences": "templates"}, "kdpl": {"teacher": "mini"}, "kdpl-maple": {"teacher": "mini"}},
    quick={"epochs": 2},
)
PROFILES = {profile.name: profile for profile in (PAPER, MINI)}


def find_profile(name: str) -> Profile:
    """Find a profile by name. Raises UsageError with the nearest known name."""
    check_names("profile", [name], PROFILES)
    return PROFILES[name]
