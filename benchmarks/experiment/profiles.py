"""Define profiles: the data sets, backbone and recipes of the paper, and those of generated data without a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.experiment.published import DATASETS
from procap.errors import check_names
from procap.methods import method_class


@dataclass(frozen=True)
class Profile:
    """Data sets, their backbone, and how long methods are trained on them.

    recipe, overrides: as `plan_run` takes them. quick: more overrides, for a smoke test. general: the data set used as
    ImageNet, and shifts: its shifted test sets. is_generated: its data are generated, for which a method has a learning
    rate and options, `mini_lr` and `mini_options`.
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
    is_generated: bool = False
    quick: Mapping[str, Any] = field(default_factory=dict)

    def options(self, method: str) -> Mapping[str, object]:
        """Return options that a method has on the data of this profile."""
        return method_class(method).mini_options if self.is_generated else {}


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
MINI = Profile(
    "mini",
    ("shapes", "coloured-shapes", "textures", "petals", "tiles", "glyphs", "digits"),
    backbone="mini",
    general="shapes",
    shifts=("shapes-v2", "shapes-sketch", "shapes-hard", "shapes-art"),
    recipe="procap",
    overrides={"epochs": 10, "batch_size": 16, "warmup_epochs": 1},
    is_generated=True,
    quick={"epochs": 2},
)
PROFILES = {profile.name: profile for profile in (PAPER, MINI)}


def find_profile(name: str) -> Profile:
    """Find a profile by name. Raises UsageError with the nearest known name."""
    check_names("profile", [name], PROFILES)
    return PROFILES[name]
