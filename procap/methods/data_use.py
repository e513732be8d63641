"""What a method looks at beside the frozen CLIP and its templates; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FURTHER_IMAGES = ("base", "train", "test")
"""The values of `DataUse.unlabelled` that name images beyond the few-shot samples."""


@dataclass(frozen=True)
class DataUse:
    """The data and the further models that a method looks at until it has classified the test images.

    labelled: the images with labels: the "few-shot" samples, these and "validation" images, or "none".
    unlabelled: images without labels: "none", the "few-shot" samples, all of the "train" split, only those of the
        "base" classes in it, or those of the "test" split.
    names: the class names: "none", those of the classes trained on ("base"), or while it trains also those of new
        classes ("all").
    models: further models and texts, such as "teacher" or "sentences".
    """

    labelled: Literal["none", "few-shot", "validation"] = "few-shot"
    unlabelled: Literal["none", "few-shot", "base", "train", "test"] = "none"
    names: Literal["none", "base", "all"] = "base"
    models: tuple[str, ...] = ()

    @property
    def further(self) -> tuple[str, ...]:
        """What it looks at that is neither a labelled few-shot sample nor the name of a class trained on."""
        validation = "validation images" if self.labelled == "validation" else ""
        images = f"unlabelled {self.unlabelled} images" if self.unlabelled != "none" else ""
        names = "names of new classes" if self.names == "all" else ""
        return *filter(None, (validation, images, names)), *self.models

    def __str__(self) -> str:
        images = "few-shot images" if self.labelled != "none" else ""
        names = "class names" if self.names != "none" else ""
        return ", ".join(filter(None, (images, names, *self.further)))
