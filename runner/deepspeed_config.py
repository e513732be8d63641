"""Build the DeepSpeed configuration of a run; everything that changes the result follows from the `RunConfig`.

A user's JSON chooses only how DeepSpeed works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from procap.errors import UsageError
from runner.config import FrozenModel, RunConfig, explain_validation_error


class ZeroChoices(FrozenModel):
    """Fields of `zero_optimization` that the user may set."""

    stage: Literal[0, 1, 2] = 0
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    contiguous_gradients: bool | None = None
    overlap_comm: bool | None = None
    reduce_scatter: bool | None = None
    use_multi_rank_bucket_allreduce: bool | None = None


class Choices(FrozenModel):
    """All fields that the user may set; DeepSpeed writes to stderr only."""

    model_config = ConfigDict(strict=True)

    log_level: Literal["debug", "info", "warning", "error", "critical"] = "error"
    steps_per_print: int | None = Field(default=None, ge=1)
    wall_clock_breakdown: bool = False
    zero_optimization: ZeroChoices = ZeroChoices()


def deepspeed_config(
    config: RunConfig, world_size: int, stage: int | None = None, user: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the configuration for `world_size` processes at ZeRO `stage` (default: the user's, else 0)."""
    if stage not in (None, 0, 1, 2):
        raise UsageError(f"ZeRO stage {stage} is not supported: use 0, 1 or 2 (3 would share out frozen weights)")
    try:
        choices = Choices.model_validate(user or {})
    except ValidationError as error:
        raise explain_validation_error(error, Choices, "DeepSpeed's configuration") from error
    chosen = choices.model_dump(exclude_none=True)
    if stage is not None:
        chosen["zero_optimization"]["stage"] = stage
    batch = config.recipe.batch_size
    if batch % world_size:
        raise UsageError(f"a global batch of {batch} images does not divide evenly among {world_size} processes")
    return {
        **chosen,
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.recipe.grad_clip or 0.0,
        "communication_data_type": "fp32",
        # The optimizer is torch's, and DeepSpeed refuses optimizers outside its list of tested ones by default.
        "zero_allow_untested_optimizer": True,
    }


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Read the user's JSON without fields that are "auto", as other programs' files leave a choice to the program."""

    def drop_auto(section: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in section.items() if value not in ("auto", {})}

    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_hook=drop_auto)
    except OSError as error:
        raise UsageError(f"cannot read the DeepSpeed configuration {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"the DeepSpeed configuration {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f'the DeepSpeed configuration {path} is not a JSON object, as in {{"steps_per_print": 100}}')
    return found
