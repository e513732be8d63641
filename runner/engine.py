"""Carry out a training step: gradients and update, in one process or averaged over the ranks by DDP.

Shapes: B images, T loss terms, W processes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from procap.methods.method import Method, Noise
from procap.recipe import Recipe
from runner.checkpoint import fill_optimizer, load_into, optimizer_slots, training_parts, training_tensors
from runner.config import RunConfig
from runner.distributed.collectives import ProcessGroup


@dataclass(frozen=True)
class Batch:
    """What a step reads, on the device: images [B / W, 3, S, S], labels [B] of the global batch, the method's noise."""

    images: Tensor
    labels: Tensor
    noise: Noise

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.images, self.labels, *self.noise

    def copy(self) -> Batch:
        return Batch(self.images.clone(), self.labels.clone(), tuple(noise.clone() for noise in self.noise))

    def takes(self, other: Batch) -> bool:
        """Whether `other` has the same shapes, so that it can be copied into this one."""
        return [t.shape for t in self.tensors] == [t.shape for t in other.tensors]


def make_optimizer(method: Method, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over everything that the method learns."""
    decay, device = recipe.weight_decay, method.clip.device
    on_gpu = device.type == "cuda"
    # Captured steps read the rate from the device, where it can be changed for them.
    lr = torch.tensor(recipe.lr, device=device) if on_gpu else recipe.lr
    # One kernel for all parameters: ProCAP has hundreds of small ones, and a loop over them takes as long as a pass.
    if recipe.optimizer == "adamw":
        betas = recipe.betas
        # Some steps run eagerly, at least those that warm up; torch warns of that.
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
        return torch.optim.AdamW(method.parameters(), lr, betas, weight_decay=decay, fused=True, capturable=on_gpu)
    return torch.optim.SGD(method.parameters(), lr, momentum=recipe.momentum, weight_decay=decay, fused=True)


def autocast(config: RunConfig, device: torch.device) -> AbstractContextManager[object]:
    """The precision of a run; parameters and optimizer are float32 in both."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if config.precision == "bf16" else nullcontext()


class Objective(nn.Module):
    """The loss of a run as a module, for DDP and DeepSpeed to wrap.

    names: the loss terms, in order, once it was computed.
    """

    def __init__(self, method: Method, config: RunConfig) -> None:
        super().__init__()
        self.method = method
        self.config = config
        self.names: tuple[str, ...] = ()

    def forward(self, images: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        """The weighted terms [T], at the run's precision."""
        with autocast(self.config, images.device):
            terms = self.method.loss(images, labels, noise)
            self.names = tuple(terms)
            return torch.stack(list(terms.values()))


class Engine:
    """Method, optimizer and, in a group, DistributedDataParallel over the learnable tensors."""

    def __init__(self, method: Method, config: RunConfig, group: ProcessGroup | None = None) -> None:
        self.method = method
        self.objective = Objective(method, config)
        self.optimizer = make_optimizer(method, config.recipe)
        self.module: nn.Module = self.objective
        self._averaging: Averaging | None = None
        if group is not None and group.ranks.size > 1:
            device = method.clip.device
            self._averaging = Averaging(group, device)
            self.module = parallel = nn.parallel.DistributedDataParallel(
                self.objective,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # Every step uses every learnable tensor in the same way, so DDP need not search for unused ones.
                static_graph=True,
                **cast(Any, {_buffers_switch(): False}),
            )
            # A lambda: DDP reads annotations of hooks and cannot read those of this file, which are strings.
            parallel.register_comm_hook(self._averaging, lambda averaging, bucket: averaging.of(bucket))

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps, in place where captured steps read it from the device."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def terms(self, batch: Batch) -> Tensor:
        """The loss terms [T] of `batch`, with their graph."""
        return self.module(batch.images, batch.labels, *batch.noise)

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, averaged over the ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self._averaging is not None:
            self._averaging.done()

    def update(self) -> None:
        """Clip the gradients where the recipe says so, and take an optimizer step."""
        if (limit := self.objective.config.recipe.grad_clip) is not None:
            nn.utils.clip_grad_norm_(self.method.parameters(), limit)
        self.optimizer.step()

    def close(self) -> None:
        """Release DDP before the process group is destroyed."""
        self.module = self.objective

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name, on the CPU; all ranks call this."""
        return training_tensors(self.method, optimizer_slots(self.method, self.optimizer))

    def load(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        """Load what `tensors` returned. Raises UserError naming `source` where it is of another method."""
        learned, slots = training_parts(tensors)
        load_into(self.method, learned, source)
        fill_optimizer(self.method, self.optimizer, slots)


def _buffers_switch() -> str:
    """The argument of DDP that broadcasts buffers before every step, by its name in this version of torch."""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


class Averaging:
    """DDP's communication hook: averages gradient buckets and measures how long the end of the backward pass waits."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD

    def of(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket over the ranks."""
        self._group.begin_waiting(self._device)
        return allreduce_hook(self._world, bucket)

    def done(self) -> None:
        """Count the time since the last bucket was sent as communication: no other work could fill it."""
        self._group.end_waiting(self._device)
