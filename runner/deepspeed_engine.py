"""Train with DeepSpeed: ZeRO stages 1 and 2 with torch's optimizers, at the run's precision (fp32 or bf16).

DeepSpeed flattens the learned tensors of an optimizer group to one padded vector, of which each rank updates an equal
part. The groups of torch's optimizer, whose rates `Engine.set_rates` sets, stay in use.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from procap.errors import UsageError, UserError
from procap.methods.hooks import GradientRule
from procap.methods.method import Method
from runner.config import RunConfig
from runner.distributed.collectives import ProcessGroup
from runner.engine import Engine, learned_parameters


class DeepSpeedEngine(Engine):
    """An `Engine` on DeepSpeed; `close` it, and collect garbage, before the process group is destroyed."""

    def __init__(self, method: Method, config: RunConfig, group: ProcessGroup | None = None, stage: int = 1) -> None:
        """stage: of ZeRO, 1 or 2. Raises UsageError for fp16, whose loss scale ZeRO would keep on every rank."""
        if config.precision == "fp16":
            raise UsageError("--engine deepspeed trains with fp32 or bf16: use --engine ddp for fp16")
        if isinstance(method, GradientRule):
            raise UsageError(f"--engine deepspeed averages one gradient, and {config.method} combines several: use ddp")
        super().__init__(method, config)
        self.group, self.stage = group or ProcessGroup(), stage
        self.name = f"deepspeed, ZeRO stage {stage}, {self.group.size} processes"
        self._learnables = list(learned_parameters(method).values())
        self._is_alone = not dist.is_initialized()
        device = method.clip.device
        index = (torch.cuda.current_device() if device.index is None else device.index) if device.type == "cuda" else 0
        # DeepSpeed reads these while it is imported and initialized.
        variables = patch.dict(os.environ, DS_ACCELERATOR=device.type, LOCAL_RANK=str(index))
        # DeepSpeed prints messages to stdout, which is for results.
        with variables, redirect_stdout(sys.stderr):
            deepspeed = _import_deepspeed(device)
            if self._is_alone:
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                # A HashStore lives in this process and needs no port.
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_init_required=False)
            for learnable in self._learnables:
                # In place of DeepSpeed's own broadcast, which `_initialize` prevents.
                dist.broadcast(learnable.detach(), src=0)
            self.module = self._deepspeed = self._initialize(deepspeed)

    def _initialize(self, deepspeed: ModuleType) -> Any:
        """Wrap objective and optimizer in DeepSpeed's engine."""
        recipe = self.objective.config.recipe
        settings: dict[str, Any] = {
            "train_batch_size": recipe.batch_size,
            "train_micro_batch_size_per_gpu": recipe.batch_size // self.group.size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": recipe.grad_clip or 0.0,
            "communication_data_type": "fp32",
            # The optimizer is torch's, and DeepSpeed refuses optimizers outside its list of tested ones by default.
            "zero_allow_untested_optimizer": True,
            # The default bucket reserves two gigabytes, a thousand times as much as the learned tensors need.
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": sum(learnable.numel() for learnable in self._learnables),
            },
        }
        for learnable in self._learnables:
            # DeepSpeed does not broadcast tensors with this attribute; its broadcast fails on scalars.
            learnable.ds_optim_param = True  # type: ignore[attr-defined]
        try:
            return deepspeed.initialize(
                model=self.objective, optimizer=self.optimizer, config=settings, dist_init_required=False
            )[0]
        finally:
            for learnable in self._learnables:
                del learnable.ds_optim_param  # type: ignore[attr-defined]

    def backward(self, terms: Tensor) -> None:
        """Compute the gradients of the sum of `terms`, averaged over the ranks; at stage 2 each rank keeps its part."""
        self._deepspeed.backward(terms.sum())

    def update(self) -> None:
        """Take an optimizer step. Raises UserError if gradients are not finite."""
        self._deepspeed.step()
        if not self._deepspeed.was_step_applied():
            raise UserError(f"the gradients of a step are not finite: try {self.objective.config.stability_hint}")

    def state(self) -> dict[str, Any]:
        """Collect the state dicts of all that training changes; of the optimizer's, one per rank."""
        # Each rank has only its part of the optimizer's state.
        state = super().state()
        return {**state, "optimizer": self.group.all_gather_object(state["optimizer"])}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned in as many ranks."""
        from deepspeed.utils import safe_set_full_fp32_param

        super().load({**state, "optimizer": state["optimizer"][self.group.rank]})
        # The optimizer updates copies of the learned tensors.
        for learnable in self._learnables:
            safe_set_full_fp32_param(learnable, learnable.detach())

    def close(self) -> None:
        """Release DeepSpeed, because what remains of it when the interpreter ends can abort the process."""
        from deepspeed.utils import groups

        self.module = self.objective
        with redirect_stdout(sys.stderr):
            self._deepspeed.destroy()
        del self._deepspeed
        # `destroy` leaves references to process groups in the globals of this module.
        groups._release_process_group_references()
        if self._is_alone:
            gc.collect()
            dist.destroy_process_group()


def _import_deepspeed(device: torch.device) -> ModuleType:
    try:
        import deepspeed
        from deepspeed.utils import groups
    except ImportError as error:
        raise UserError(
            f"--engine deepspeed needs deepspeed ({error}): pip install 'deepspeed>=0.19.8', or --engine ddp"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # Switch off DeepSpeed's shared-memory communication: at the first start it is compiled for minutes, by a
        # compiler that may be missing, and gloo does the same.
        compatible = deepspeed.ops.__compatible_ops__
        compatible.update({name: False for name in compatible if "shm" in name})
    if dist.is_initialized() and groups._WORLD_GROUP is None:
        # DeepSpeed's copy of the group would wait for a lost rank much longer than the run's timeout.
        groups._WORLD_GROUP = dist.group.WORLD
    return deepspeed
