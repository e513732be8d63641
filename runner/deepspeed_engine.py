"""Train with DeepSpeed: ZeRO stages 0, 1 and 2 with torch's optimizers, the run's precision and states.

Autocast and loss scale are the run's own, as with DDP: DeepSpeed's fp16 mode would store learned tensors in float16,
and its torch_autocast mode lets every rank decide about overflow from its own part of the gradients.

At stages 1 and 2 DeepSpeed flattens the learned tensors of an optimizer group to one padded vector, of which each rank
updates an equal part. A saved state is assembled from these parts, so that a training can resume at another stage, size
or with DDP.

Shapes: W ranks, N numbers in one part of the vector.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from procap.errors import UserError
from procap.methods.method import Method
from runner.checkpoint import fill_optimizer, fill_scaler, load_learned, optimizer_slots, training_tensors
from runner.config import RunConfig
from runner.engine import Engine, learned_parameters


class DeepSpeedEngine(Engine):
    """An `Engine` on DeepSpeed; `close` it, and collect garbage, before the process group is destroyed."""

    def __init__(self, method: Method, config: RunConfig, world_size: int, stage: int = 0) -> None:
        """stage: of ZeRO, 0, 1 or 2."""
        super().__init__(method, config)
        self.stage = stage
        self._groups: list[list[nn.Parameter]] = [list(group["params"]) for group in self.optimizer.param_groups]
        self._learnables = [learnable for group in self._groups for learnable in group]
        self._alone = not dist.is_initialized()
        device = method.clip.device
        with _environment(device), redirect_stdout(sys.stderr):
            deepspeed = _import_deepspeed(device)
            if self._alone:
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_init_required=False)
            for learnable in self._learnables:
                dist.broadcast(learnable.detach(), src=0)
            self.module = self._deepspeed = self._initialize(deepspeed, world_size)
        if self.stage and not all(torch.equal(self._part(group, vector), vector) for group, vector in self._parts()):
            raise UserError(
                f"DeepSpeed {deepspeed.__version__} lays out ZeRO's partitions in a way unknown to this program: "
                f"use --zero-stage 0, --engine ddp or DeepSpeed 0.19.8"
            )

    def _initialize(self, deepspeed: ModuleType, world_size: int) -> Any:
        """Wrap objective and optimizer in DeepSpeed's engine."""
        recipe = self.objective.config.recipe
        settings: dict[str, Any] = {
            "train_batch_size": recipe.batch_size,
            "train_micro_batch_size_per_gpu": recipe.batch_size // world_size,
            "gradient_accumulation_steps": 1,
            # At stage 0 `update` clips instead: DeepSpeed's clipping fails on scalar parameters, and all ranks have the
            # whole gradients, as with DDP.
            "gradient_clipping": (recipe.grad_clip or 0.0) if self.stage else 0.0,
            "communication_data_type": "fp32",
            # The optimizer is torch's, and DeepSpeed refuses optimizers outside its list of tested ones by default.
            "zero_allow_untested_optimizer": True,
            # The default bucket reserves two gigabytes, a thousand times as much as the learned tensors need.
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": sum(each.numel() for each in self._learnables),
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

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`, averaged over the ranks; at stage 2 each rank keeps its part of them."""
        if self.stage and self.scaler.is_enabled():
            # ZeRO multiplies the loss by this scale, and divides the gradients by it when it clips them.
            self._deepspeed.optimizer.override_loss_scale(self.scaler.get_scale())
            self._deepspeed.backward(loss)
        else:
            self._deepspeed.backward(self.scaler.scale(loss))

    def update(self) -> None:
        """Take an optimizer step; fp16 skips it if the gradients overflow.

        Raises UserError if stage 1 or 2 finds gradients of another precision that are not finite.
        """
        if self.stage:
            self._deepspeed.step()
            skips = not self._deepspeed.was_step_applied()
            if skips and not self.scaler.is_enabled():
                raise UserError(f"the gradients of a step are not finite: try {self.objective.config.stability_hint}")
            self._adjust_scale(skips)
        else:
            skips = self._update_whole()
        self.skipped.fill_(skips)

    def _update_whole(self) -> bool:
        """Take a step of stage 0, where each rank has the whole gradients; returns whether it was skipped."""
        limit, skips = self.objective.config.recipe.grad_clip, False
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():
            gradients = [learnable.grad for learnable in self._learnables if learnable.grad is not None]
            skips = not torch.isfinite(nn.utils.get_total_norm(gradients))
        if skips:
            self._deepspeed.zero_grad()
        else:
            if limit is not None:
                nn.utils.clip_grad_norm_(learned_parameters(self.method).values(), limit)
            self._deepspeed.step()
        self.scaler.update()
        return skips

    def _adjust_scale(self, skipped: bool) -> None:
        """Change the loss scale after a step of stage 1 or 2 by the rule of torch's scaler, which does not see it."""
        if not self.scaler.is_enabled():
            return
        state = self.scaler.state_dict()
        state["_growth_tracker"] += 1
        if skipped:
            state |= {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
        elif state["_growth_tracker"] == state["growth_interval"]:
            state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        self.scaler.load_state_dict(state)

    def tensors(self) -> dict[str, Tensor]:
        """Collect all tensors that training changes, by name, on the CPU, unsharded; all ranks call this."""
        if not self.stage:
            return training_tensors(self.method, optimizer_slots(self.method, self.optimizer), self.scaler)
        names = {learnable: name for name, learnable in learned_parameters(self.method).items()}
        slots: dict[str, Tensor] = {}
        for group, vector in self._parts():
            # Sorted, because all ranks must gather the same slot, and a loaded state has its slots in any order.
            for slot, value in sorted(self.optimizer.state.get(vector, {}).items()):
                if isinstance(value, Tensor):
                    # Adam's step count is one number for the whole vector here, but one per learned tensor with DDP.
                    values = [value] * len(group) if value.shape != vector.shape else _whole(value, group)
                    slots |= {f"{names[own]}/{slot}": each.clone() for own, each in zip(group, values, strict=True)}
        return training_tensors(self.method, slots, self.scaler)

    def load(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        """Load what `tensors` of any engine returned. Raises UserError naming `source` if it is of another method."""
        slots = load_learned(self.method, tensors, self.objective.config.recipe, source)
        fill_scaler(self.scaler, tensors)
        if not self.stage:
            fill_optimizer(self.method, self.optimizer, slots)
            return
        names = {learnable: name for name, learnable in learned_parameters(self.method).items()}
        state: dict[int, dict[str, Tensor]] = {}
        for number, (group, vector) in enumerate(self._parts()):
            with torch.no_grad():
                vector.copy_(self._part(group, vector))
            for slot in {key.rpartition("/")[2] for key in slots}:
                each = [slots[f"{names[own]}/{slot}"] for own in group]
                single = any(value.shape != own.shape for value, own in zip(each, group, strict=True))
                state.setdefault(number, {})[slot] = each[0].clone() if single else self._part(each, vector)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def close(self) -> None:
        """Release DeepSpeed, because what remains of it when the interpreter ends can abort the process."""
        from deepspeed.utils import groups

        self.module = self.objective
        with redirect_stdout(sys.stderr):
            self._deepspeed.destroy()
        del self._deepspeed
        groups._release_process_group_references()
        if self._alone:
            gc.collect()
            dist.destroy_process_group()

    def _parts(self) -> list[tuple[list[nn.Parameter], Tensor]]:
        """Pair the learned tensors of each group with this process's part [N] of their vector, which it updates."""
        vectors = [vector for group in self.optimizer.param_groups for vector in group["params"]]
        return list(zip(self._groups, vectors, strict=True))

    def _part(self, tensors: Sequence[Tensor], own: Tensor) -> Tensor:
        """Return the part [N] of tensors with the shapes of a group that is laid out as `own`, this process's part."""
        flat = torch.cat([tensor.detach().reshape(-1).to(own) for tensor in tensors])
        flat = nn.functional.pad(flat, (0, max(0, own.numel() * dist.get_world_size() - flat.numel())))
        return flat[dist.get_rank() * own.numel() :][: own.numel()].clone()


def _whole(part: Tensor, group: Sequence[Tensor]) -> list[Tensor]:
    """Assemble tensors with the shapes of a group from each process's part [N]."""
    flat = part.new_empty(dist.get_world_size() * part.numel())
    dist.all_gather_into_tensor(flat, part)
    sizes = [each.numel() for each in group]
    parts = flat[: sum(sizes)].split(sizes)
    return [values.view(each.shape) for values, each in zip(parts, group, strict=True)]


def _import_deepspeed(device: torch.device) -> ModuleType:
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils import groups
    except ImportError as error:
        raise UserError(
            f"--engine deepspeed needs the package deepspeed ({error}): pip install 'deepspeed>=0.19', or --engine ddp"
        ) from error
    log = logging.getLogger("DeepSpeed")
    log.setLevel(logging.ERROR)
    for handler in log.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    loaded = get_accelerator().device_name()
    if loaded != device.type:
        raise UserError(f"DeepSpeed was loaded for {loaded}, but the run is on {device.type}: use a new process")
    if device.type == "cpu":
        # Switch off DeepSpeed's shared-memory communication: at the first start it is compiled for minutes, by a
        # compiler that may be missing, and gloo does the same.
        compatible = deepspeed.ops.__compatible_ops__
        compatible.update({name: False for name in compatible if "shm" in name})
    if dist.is_initialized() and groups._WORLD_GROUP is None:
        # DeepSpeed's copy of the group would wait for a lost rank much longer than the run's timeout.
        groups._WORLD_GROUP = dist.group.WORLD
    return deepspeed


@contextmanager
def _environment(device: torch.device) -> Iterator[None]:
    """Set the environment variables that DeepSpeed reads while it is imported and initialized."""
    index = (torch.cuda.current_device() if device.index is None else device.index) if device.type == "cuda" else 0
    wanted = {"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(index)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
