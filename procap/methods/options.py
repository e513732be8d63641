"""Options that several methods share, and what other parts of the program read from them; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TEMPLATES = "templates"
"""The value of a required option that names a file of texts, for hand-written templates in place of the file."""

Pool = Literal["few-shot", "base", "all"]
"""Where a training draws images without labels from, see `PoolOptions`."""


class MethodOptions(BaseModel):
    """The options of a method, none here: a value never changes, an unknown field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of_length(cls, tokens: int) -> dict[str, object]:
        """Return the options under which prompts have `tokens` learned tokens; none for a method without `n_ctx`."""
        return {"n_ctx": tokens} if "n_ctx" in cls.model_fields else {}


class TemplateOptions(MethodOptions):
    template: str = Field("a photo of a {}.", description="prompt of every class, on every data set")


class ViewOptions(MethodOptions):
    views: int = Field(10, ge=0, description="random views of each image, used in turn by the epochs; 0: new ones")


class SelectionOptions(MethodOptions):
    selection: Literal["validation", "test"] = Field(
        "validation",
        description="validation: choose on at most four validation images per class; test: the public rule, which "
        "searches all of them (ImageNet: the test images) and keeps what has the highest test accuracy",
    )


class PoolOptions(MethodOptions):
    unlabelled: Pool = Field(
        "few-shot",
        description="images of a training without labels: the few-shot ones; base: all training images of the classes "
        "trained on; all: those of every class, whose names are learned from as well, as the public code does",
    )


def is_chosen_on_test(options: Mapping[str, Any]) -> bool:
    """Whether the options of any method, installed or not, choose by test accuracy, as `SelectionOptions` can."""
    return options.get("selection") == "test"
