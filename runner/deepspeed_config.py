"""Build the DeepSpeed configuration of a run; everything that changes the result follows from the `RunConfig`.

A user's JSON may choose how DeepSpeed works, and may repeat what the run has; it cannot change it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from procap.errors import UsageError, unknown_name
from runner.config import RunConfig, explain_validation_error

AUTO = "auto"
"""A value that leaves the choice to the program, as other programs' DeepSpeed files spell it."""

ZERO_CHOICES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
)
"""Fields of `zero_optimization` that the user may set."""

# DeepSpeed's own bf16 casts the weights, and at stage 0 its start counts as a step of Adam with weight decay.
OTHER_PRECISIONS = ("bf16", "fp16", "amp", "torch_autocast")


class Choices(BaseModel):
    """Other fields that the user may set; DeepSpeed writes to stderr only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    log_level: Literal["debug", "info", "warning", "error", "critical"] = "error"
    steps_per_print: int | None = Field(default=None, ge=1)
    wall_clock_breakdown: bool = False


def deepspeed_config(
    config: RunConfig, world_size: int, stage: int | None = None, user: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the configuration for `world_size` processes at a ZeRO stage, merged with the user's choices.

    stage: 0, 1 or 2; None takes the user's, else 0.
    user: what `read_deepspeed_json` gave. "auto" anywhere is as if it were not there.
    Raises UsageError for an unknown or unsupported field, and for one that contradicts the run.
    """
    given = _without_auto(user or {})
    zero = given.get("zero_optimization", {})
    if stage is None:
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage not in (0, 1, 2) or isinstance(stage, bool):
        raise UsageError(f"ZeRO stage {stage!r} is not supported: use 0, 1 or 2 (3 would share out frozen weights)")
    recipe, batch = config.recipe, config.recipe.batch_size
    if batch % world_size:
        raise UsageError(f"a global batch of {batch} images does not divide evenly among {world_size} processes")
    decided = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.grad_clip or 0.0,
        "communication_data_type": "fp32",
        # The optimizer is torch's, and DeepSpeed refuses optimizers outside its list of tested ones by default.
        "zero_allow_untested_optimizer": True,
    }
    params: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "adamw":
        params |= {"betas": list(recipe.betas), "eps": 1e-8, "torch_adam": True, "adam_w_mode": True}
    else:
        params |= {"momentum": recipe.momentum, "dampening": 0, "nesterov": False}
    if isinstance(optimizer := given.get("optimizer"), dict) and isinstance(optimizer.get("type"), str):
        optimizer["type"] = optimizer["type"].lower()
    for name in OTHER_PRECISIONS:
        if isinstance(section := given.get(name), Mapping):
            given[name] = {"enabled": section.get("enabled", False)}
    fixed = decided | {"optimizer": {"type": recipe.optimizer, "params": params}, "zero_optimization": {"stage": stage}}
    fixed |= {name: {"enabled": False} for name in OTHER_PRECISIONS}
    _check(given, fixed, {"": tuple(Choices.model_fields), "zero_optimization": ZERO_CHOICES})
    try:
        choices = Choices.model_validate({name: given[name] for name in Choices.model_fields if name in given})
    except ValidationError as error:
        raise explain_validation_error(error, Choices, "DeepSpeed's configuration") from error
    return {**choices.model_dump(exclude_none=True), **decided, "zero_optimization": {**zero, "stage": stage}}


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Read the user's JSON. Raises UsageError for a file that cannot be read or holds no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the DeepSpeed configuration {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"the DeepSpeed configuration {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f'the DeepSpeed configuration {path} is not a JSON object, as in {{"steps_per_print": 100}}')
    return found


def _check(
    given: Mapping[str, Any], fixed: Mapping[str, Any], free: Mapping[str, tuple[str, ...]], section: str = ""
) -> None:
    """Raise UsageError for a field that is not `fixed` to the same value, unless it is `free` in its section."""
    for name, value in given.items():
        path = f"{section}.{name}" if section else name
        if name in free.get(section, ()):
            continue
        if name not in fixed:
            where = f" of DeepSpeed's {section}" if section else " of DeepSpeed"
            raise unknown_name(f"or unsupported field{where}", name, (*fixed, *free.get(section, ())))
        own = fixed[name]
        if isinstance(own, Mapping):
            if not isinstance(value, Mapping):
                raise UsageError(f"DeepSpeed's {path} is {json.dumps(value)}, but it has to be a JSON object")
            _check(value, own, free, path)
        elif value != own or isinstance(value, bool) != isinstance(own, bool):
            theirs, ours = (one if isinstance(one, str) else json.dumps(one) for one in (value, own))
            raise UsageError(f"DeepSpeed's {path} is {theirs}, but the run has {ours}: leave it out, or change the run")


def _without_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if value != AUTO
    }
