"""Hold a method and its optimizer: loss terms, gradients and update, in one process or averaged over ranks by DDP.

Shapes: B images, T loss terms, W processes.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from procap.clip import CLIP
from procap.errors import UserError
from procap.methods.hooks import GradientRule
from procap.methods.method import Method, Noise
from procap.recipe import Recipe
from runner.config import Precision, RunConfig
from runner.distributed.collectives import ProcessGroup
from runner.step_schedule import distinct_peak_rates, peak_rates
from shards.rng import generator
from shards.transfer import upload


@dataclass(frozen=True)
class Batch:
    """Inputs of a step on the device: images [B / W, 3, S, S], labels [B] of the global batch, the method's noise."""

    images: Tensor
    labels: Tensor
    noise: Noise

    @classmethod
    def make(cls, method: Method, seed: int, step: int, images: Tensor, labels: Tensor) -> Batch:
        """Make the batch of a step from images and labels on the device, as the method extends them."""
        images, labels = method.extend_batch(images, labels, generator(seed, "extend", step))
        noise = method.draw(generator(seed, "noise", step))
        return cls(images, labels, tuple(upload(tensor, images.device) for tensor in noise))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.images, self.labels, *self.noise

    def copy(self) -> Batch:
        return Batch(self.images.clone(), self.labels.clone(), tuple(noise.clone() for noise in self.noise))

    def takes(self, other: Batch) -> bool:
        """Whether `other` has the same shapes, so that it can be copied into this one."""
        return [t.shape for t in self.tensors] == [t.shape for t in other.tensors]


def learned_parameters(method: nn.Module) -> dict[str, nn.Parameter]:
    """Collect what the current stage of a training learns, by name."""
    return {name: parameter for name, parameter in method.named_parameters() if parameter.requires_grad}


def group_parameters(method: Method, recipe: Recipe) -> list[dict[str, Any]]:
    """Group what the current stage of a training learns by learning rate, as an optimizer takes it.

    rate_index: the index of the group's rate in `StepSchedule.rates`. relative_rate: its peak divided by the recipe's.
    """
    peaks, peak_of = distinct_peak_rates(method, recipe), peak_rates(method, recipe)
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in learned_parameters(method).items():
        groups.setdefault(peaks.index(peak_of[name]), []).append(parameter)
    return [{"params": groups[i], "rate_index": i, "relative_rate": peaks[i] / recipe.lr} for i in sorted(groups)]


@functools.cache
def without_compiler(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass whose methods do not import torch's compiler, which takes longer than a short training."""
    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(optimizer_class, name)) for name in wrapped}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer_class.step))
    return type(optimizer_class.__name__, (optimizer_class,), methods)


def make_optimizer(method: Method, recipe: Recipe) -> torch.optim.Optimizer:
    """Make the recipe's optimizer for what the method learns, with the groups of `group_parameters`."""
    device, lr = method.clip.device, recipe.lr
    param_groups = group_parameters(method, recipe)
    optimizer_class = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(recipe.optimizer, torch.optim.SGD)
    if device.type != "cuda":
        optimizer_class = without_compiler(optimizer_class)
    # `fused`: one kernel for all parameters. ProCAP has hundreds of small ones; a loop over them takes as long as a
    # forward pass.
    # The rate is a start value: `set_rates` sets that of each step.
    shared: dict[str, Any] = {"lr": lr, "weight_decay": recipe.weight_decay, "fused": True}
    is_sgd = recipe.optimizer == "sgd"
    shared |= {"momentum": recipe.momentum} if is_sgd else {"betas": recipe.betas, "eps": recipe.eps}
    return optimizer_class(param_groups, **shared)


AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of a precision; parameters and optimizer are always float32."""
    return torch.autocast(device.type, dtype=AUTOCAST_TYPES[precision]) if precision != "fp32" else nullcontext()


SMALL_PRODUCT = {"train": 40_000_000, "eval": 10_000_000}
"""Below this number of multiplications in the image tower's smallest matrix product, use one thread.

Waking a second thread takes about 90 us, and a step does so hundreds of times. With mini (0.6 million multiplications
per image; ViT-B/16: 118 million) training with two threads is 2.2 times as slow at batch 4 and faster at batch 100.
"""


@contextmanager
def fitting_threads(clip: CLIP, images: int, work: Literal["train", "eval"] = "train") -> Iterator[None]:
    """Use one thread for batches of few small images, by their size alone, unless OMP_NUM_THREADS is set."""
    threads = torch.get_num_threads()
    # The size of a tower of open_clip counts as 0; none of them is small.
    small = 0 < images * clip.visual.num_tokens * clip.geometry.vision_width**2 < SMALL_PRODUCT[work]
    if clip.device.type != "cpu" or not small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Objective(nn.Module):
    """The loss of a run as a module, which DDP and DeepSpeed wrap; `names` are the loss terms of the last call."""

    def __init__(self, method: Method, config: RunConfig) -> None:
        super().__init__()
        self.method = method
        self.config = config
        self.names: tuple[str, ...] = ()

    def forward(self, images: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        """Compute the weighted loss terms [T], at the run's precision."""
        with autocast(self.config.precision, images.device):
            terms = self.method.loss(images, labels, noise)
            check_terms(terms, self.config.method)
            self.names = tuple(terms)
            return torch.stack(list(terms.values()))

    def separate_terms(self, images: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        """Compute the terms [T] of a call for several backward passes, which what torch compiles does not allow."""
        # Importing the compiler takes seconds; before that nothing is compiled.
        is_imported = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_imported else nullcontext():
            return self(images, labels, *noise)


def check_terms(terms: object, method: str) -> None:
    """Raise UserError that names the first loss term that is not a tensor without dimensions; reads no value."""
    if not isinstance(terms, dict) or not terms:
        raise UserError(f"loss() of method '{method}' must return a dict of terms by name")
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim():
            problem = f"has the shape {[*term.shape]}" if isinstance(term, Tensor) else f"is a {type(term).__name__}"
            raise UserError(f"loss term '{name}' of method '{method}' {problem}, a tensor without shape is needed")


def check_head(head: object, method: str) -> None:
    """Raise UserError if what `head` of a method on features has returned is no map, as without a `return`."""
    if not callable(head):
        raise UserError(f"head() of method '{method}' must return a map of features to logits")


def term_gradients(objective: Objective, terms: Tensor, group: ProcessGroup) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the name of each of the `separate_terms` [T] and its gradients by parameter, averaged over the ranks."""
    learned = learned_parameters(objective.method)
    for name, term in zip(objective.names, terms.unbind(), strict=True):
        # The terms share a graph. A parameter that a term does not use has a gradient of zeros instead of None.
        parts = torch.autograd.grad(term, list(learned.values()), retain_graph=True, materialize_grads=True)
        # An expanded tensor cannot be averaged in place.
        gradients = [part.contiguous() for part in parts]
        for gradient in gradients:
            group.average(gradient)
        yield name, dict(zip(learned, gradients, strict=True))


class Engine:
    """Method, optimizer and, in a group of several ranks, DistributedDataParallel over the learned tensors.

    scaler: multiplies the loss of an fp16 run, so that small gradients are not rounded to zero; other runs have a
        disabled one, which changes nothing. A step whose gradients overflow is skipped, and the next scale is smaller.
    skipped: 1.0 on the device if the last step was skipped, else 0.0.
    name: identifies the layout of `state`, which another engine cannot load.
    """

    name = "ddp"

    def __init__(self, method: Method, config: RunConfig, group: ProcessGroup | None = None) -> None:
        self.method = method
        self.objective = Objective(method, config)
        self.optimizer = make_optimizer(method, config.recipe)
        self.scaler = torch.amp.GradScaler(method.clip.device.type, enabled=config.precision == "fp16")
        self.skipped = torch.zeros((), device=method.clip.device)
        if self.scaler.is_enabled():
            # In a hook, because the scaler takes the flag away from the optimizer after its step.
            self.optimizer.register_step_post_hook(partial(_record_overflow, self.skipped))
        self.module: nn.Module = self.objective
        self.group = group or ProcessGroup()
        if self.group.size > 1 and not isinstance(method, GradientRule):
            device = method.clip.device
            # The argument that broadcasts buffers before every step has two names in the supported versions of torch.
            arguments = inspect.signature(nn.parallel.DistributedDataParallel).parameters
            name = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
            buffers: dict[str, Any] = {name: False}
            self.module = nn.parallel.DistributedDataParallel(
                self.objective,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # Every step uses every learnable tensor in the same way, so DDP need not search for unused ones.
                static_graph=True,
                **buffers,
            )

    def set_rates(self, rates: Sequence[float] | Mapping[int, float]) -> None:
        """Set the rates of the next steps to those of `StepSchedule.rates`, or to others by their index there."""
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rates[param_group["rate_index"]]

    def set_recipe_rate(self, rate: float) -> None:
        """Set the recipe's rate for a measurement, which has no `StepSchedule`; other rates keep their ratio to it."""
        groups = self.optimizer.param_groups
        self.set_rates({group["rate_index"]: rate * group["relative_rate"] for group in groups})

    def terms(self, batch: Batch) -> Tensor:
        """Compute the loss terms [T] of `batch`, with their autograd graph."""
        compute = self.objective.separate_terms if isinstance(self.method, GradientRule) else self.module
        return compute(batch.images, batch.labels, *batch.noise)

    def backward(self, terms: Tensor) -> None:
        """Compute the gradients of the sum of `terms` [T], or the method's combination, averaged over the ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        if not isinstance(self.method, GradientRule):
            self.scaler.scale(terms.sum()).backward()
            return
        learned = learned_parameters(self.method)
        gradients = dict(term_gradients(self.objective, self.scaler.scale(terms), self.group))
        for name, gradient in self.method.combine_gradients(gradients).items():
            learned[name].grad = gradient

    def update(self) -> None:
        """Clip the gradients if the recipe does so, and take an optimizer step.

        fp16 gradients are checked for overflow on the device: the host does not wait.
        """
        recipe = self.objective.config.recipe
        if recipe.grad_clip is not None:
            # The limit is one of true gradients; the scaler's step knows that they are unscaled already.
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(learned_parameters(self.method).values(), recipe.grad_clip)
        if self.scaler.is_enabled():
            if recipe.optimizer == "sgd" and recipe.momentum and not self.optimizer.state:
                # torch allocates the momentum in the first step, and leaves it uninitialized if that step is skipped.
                for parameter in learned_parameters(self.method).values():
                    self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            # An optimizer that is not fused, as of a runtime comparison, is not called at all for a skipped step.
            self.skipped.fill_(1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def close(self) -> None:
        """Release DDP before the process group is destroyed."""
        self.module = self.objective

    def state(self) -> dict[str, Any]:
        """Collect the state dicts of all that training changes; all ranks call this."""
        return {
            "method": self.method.state_dict(),
            # Without its groups: their rates follow from the step, see `load`.
            "optimizer": self.optimizer.state_dict()["state"],
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        self.method.adapt_shapes(state["method"])
        self.method.load_state_dict(state["method"])
        # Learning rates follow from the step.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])


def _record_overflow(skipped: Tensor, optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Copy the flag that a GradScaler hands to a fused optimizer during its step; no other optimizer gets one."""
    overflow = getattr(optimizer, "found_inf", None)
    skipped.zero_() if overflow is None else skipped.copy_(overflow)
