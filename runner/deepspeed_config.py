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

STAGES = (0, 1, 2)
AUTO = "auto"
"""A value that leaves the choice to the program, as other programs' DeepSpeed files spell it."""

FREE_OF_ZERO = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
)

# DeepSpeed's own bf16 casts the weights, and at stage 0 its start counts as a step of Adam with weight decay.
OTHER_PRECISIONS = ("bf16", "fp16", "amp", "torch_autocast")


class Choices(BaseModel):
    """Fields that the user may set beside `FREE_OF_ZERO`; DeepSpeed writes to stderr only."""

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
    Raises UsageError for an unknown field, for one that this program does not hand on, and, with both values, for one
    that contradicts the run.
    """
    given = _without_auto(user or {})
    zero = _section(given, "zero_optimization")
    if stage is None:
        stage = zero.get("stage", 0)
    if stage not in STAGES or isinstance(stage, bool):
        raise UsageError(f"ZeRO stage {stage!r} is not supported: use 0, 1 or 2 (3 would share out frozen weights)")
    batch = config.recipe.batch_size
    if batch % world_size:
        raise UsageError(f"a global batch of {batch} images does not divide evenly among {world_size} processes")

    decided = _decided(config, world_size)
    for name, value in given.items():
        if name in decided:
            _compare(name, value, decided[name])
        elif name == "optimizer":
            _compare_optimizer(_section(given, name), config)
        elif name in OTHER_PRECISIONS:
            if (enabled := _section(given, name).get("enabled", False)) is not False:
                way = "torch's autocast over float32 weights" if config.precision == "bf16" else "without autocast"
                raise _contradiction(f"{name}.enabled", enabled, f"precision {config.precision}, {way}")
        elif name != "zero_optimization" and name not in Choices.model_fields:
            allowed = {*decided, *Choices.model_fields, *OTHER_PRECISIONS, "optimizer", "zero_optimization"}
            raise unknown_name("or unsupported DeepSpeed field", name, allowed)
    for name, value in zero.items():
        if name == "stage":
            _compare("zero_optimization.stage", value, stage)
        elif name not in FREE_OF_ZERO:
            raise unknown_name("or unsupported field of DeepSpeed's zero_optimization", name, ("stage", *FREE_OF_ZERO))
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


def _decided(config: RunConfig, world_size: int) -> dict[str, Any]:
    batch = config.recipe.batch_size
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.recipe.grad_clip or 0.0,
        "communication_data_type": "fp32",
        # The optimizer is torch's, and DeepSpeed refuses optimizers outside its list of tested ones by default.
        "zero_allow_untested_optimizer": True,
    }


def _compare_optimizer(given: Mapping[str, Any], config: RunConfig) -> None:
    recipe = config.recipe
    ours: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    if recipe.optimizer == "adamw":
        ours |= {"betas": list(recipe.betas), "eps": 1e-8, "torch_adam": True, "adam_w_mode": True}
    else:
        ours |= {"momentum": recipe.momentum, "dampening": 0, "nesterov": False}
    for name, value in given.items():
        if name == "type":
            if str(value).lower() != recipe.optimizer:
                raise _contradiction("optimizer.type", value, recipe.optimizer)
        elif name == "params":
            for key, value in _section(given, "params").items():
                if key not in ours:
                    raise unknown_name(f"parameter of DeepSpeed's optimizer for {recipe.optimizer}", key, ours)
                _compare(f"optimizer.params.{key}", value, ours[key])
        else:
            raise unknown_name("field of DeepSpeed's optimizer", name, ("type", "params"))


def _compare(name: str, given: Any, ours: Any) -> None:
    if given != ours or isinstance(given, bool) != isinstance(ours, bool):
        raise _contradiction(name, given, ours)


def _contradiction(name: str, given: Any, ours: Any) -> UsageError:
    theirs, own = (value if isinstance(value, str) else json.dumps(value, default=str) for value in (given, ours))
    return UsageError(f"DeepSpeed's {name} is {theirs}, but the run has {own}: leave it out, or change the run")


def _section(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = given.get(name, {})
    if not isinstance(section, Mapping):
        raise UsageError(f"DeepSpeed's {name} is {json.dumps(section, default=str)}, but it has to be a JSON object")
    return dict(section)


def _without_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if value != AUTO
    }
