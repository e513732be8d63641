"""Choose between plain torch with DDP and DeepSpeed."""

from __future__ import annotations

from typing import Any

from procap.methods.method import Method
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import Ranks
from runner.engine import Engine


def make_engine(method: Method, config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup) -> Engine:
    """Make the engine that `runtime` names; the caller closes it.

    Raises UsageError if DeepSpeed's configuration contradicts the run, UserError if DeepSpeed is not installed.
    """
    settings = engine_settings(config, runtime, group.ranks)
    if settings is None:
        return Engine(method, config, group)
    from runner.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(method, config, settings)


def engine_settings(config: RunConfig, runtime: RuntimeConfig, ranks: Ranks) -> dict[str, Any] | None:
    """Return DeepSpeed's configuration for a run; None with DDP. Raises UsageError if it contradicts the run."""
    if runtime.engine == "ddp":
        return None
    from runner.deepspeed_config import deepspeed_config, read_deepspeed_json

    user = read_deepspeed_json(runtime.deepspeed_json) if runtime.deepspeed_json else None
    return deepspeed_config(config, ranks.size, runtime.zero_stage, user)
