"""Check a method, most of all a plug-in, against what training, resuming, evaluation and process groups rely on."""

from __future__ import annotations

import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from procap.errors import UserError
from procap.methods import COLOUR, build_method, method_class, method_options
from procap.methods.method import TASKS, Method
from procap.recipe import Recipe
from procap.text import LabelSpace
from runner.checkpoint import read_checkpoint
from runner.config import RunConfig, RuntimeConfig, Target
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import Ranks
from runner.engine import autocast, check_terms, learned_parameters
from runner.environment import resolve_device
from runner.evaluate import evaluate
from runner.failures import describe_failure
from runner.planning import plan_run
from runner.results import TrainResult
from runner.run_folders import RunFolder
from runner.setup import Setup, label_space, make_method, set_up
from runner.train import train
from shards.fewshot import evaluation_labels
from shards.reader import open_dataset
from shards.rng import generator

EPOCHS, SHOTS, BATCH = 2, 4, 4
SPEED_ROUNDS, ROUND_CALLS = 9, 3
TERMS_TOLERANCE, WEIGHTS_TOLERANCE = 1e-3, 1e-2
"""Relative differences between one process and two, which add in another order: of loss terms, of learned tensors."""


@dataclass(frozen=True)
class CheckResult:
    """One row of the table. note: a measurement, or why the check failed."""

    name: str
    passed: bool
    note: str
    seconds: float


@dataclass(frozen=True)
class CheckCase:
    """A short training of a method on the base classes of a data set, below temporary results."""

    config: RunConfig
    runtime: RuntimeConfig

    @classmethod
    def plan(
        cls, name: str, runtime: RuntimeConfig, *, dataset: str, backbone: str, options: Mapping[str, Any]
    ) -> CheckCase:
        """Plan two epochs in the method's own recipe, with batches that two processes can share."""
        overrides = {"epochs": EPOCHS, "batch_size": BATCH, "warmup": "none"}
        config = plan_run(
            method=name,
            dataset=dataset,
            shots=SHOTS,
            backbone=backbone,
            overrides=overrides,
            options=options,
            data=runtime.data,
        )
        return cls(config, runtime)

    @cached_property
    def setup(self) -> Setup:
        return set_up(self.config, self.runtime, resolve_device(self.runtime.device), ProcessGroup())

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """The first batch of the training, on the device."""
        assert self.setup.schedule is not None
        images, labels = next(iter(self.setup.schedule.batches(0)))
        device = self.setup.method.clip.device
        return images.to(device), labels.to(device)

    def space(self, classes: str) -> LabelSpace:
        """Return base, novel or all classes of the data set."""
        shards = open_dataset(self.runtime.data, self.config.dataset)
        names = tuple(shards.classnames[label] for label in evaluation_labels(shards, classes))
        return label_space(shards.manifest, names)

    @cached_property
    def training(self) -> TrainResult:
        """The result of the uninterrupted training in one process."""
        result = train(self.config, self.runtime)
        assert isinstance(result, TrainResult)
        return result

    def make_method(self) -> Method:
        """Build the method again, ready for its first stage."""
        setup = self.setup
        method = make_method(self.config, setup.method.clip, setup.method.space)
        method.prepare_training()
        method.begin_stage(0)
        return method

    def step(self, method: Method) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute loss terms and gradients of the first step."""
        images, labels = self.batch
        noise = method.draw(generator(self.config.seed, "noise", 0))
        method.zero_grad(set_to_none=True)
        with autocast(self.config.precision, images.device):
            terms = method.loss(images, labels, tuple(each.to(images.device) for each in noise))
        check_terms(terms, self.config.method)
        _require(next(iter(terms)) == "ce", 'loss() must return the term "ce" first')
        for name, term in terms.items():
            _require(bool(torch.isfinite(term)), f"loss term {name} is not finite")
        total = torch.stack(list(terms.values())).sum()
        _require(total.requires_grad, "the sum of the loss terms has no gradient")
        total.backward()
        learned = learned_parameters(method)
        missing = [name for name, parameter in learned.items() if parameter.grad is None]
        _require(not missing, f"no gradient reaches {', '.join(missing)}: use or freeze them (requires_grad_(False))")
        return terms, {name: parameter.grad for name, parameter in learned.items() if parameter.grad is not None}


def _require(condition: bool, reason: str) -> None:
    """Fail a check. reason: what the method does not do, and what would."""
    if not condition:
        raise UserError(reason)


@contextmanager
def _global_generators(seed: int, what: str) -> Iterator[None]:
    """Seed all global generators of random numbers. Raises UserError if the block draws from one of them."""

    def states() -> dict[str, Any]:
        numpy = repr(np.random.get_state())
        return {"torch's": torch.get_rng_state().tolist(), "numpy's": numpy, "Python's": random.getstate()}

    torch.manual_seed(seed)
    before = states()
    yield
    moved = [name for name, state in states().items() if state != before[name]]
    remedy = "draw in draw() with its generator" if what != "__init__()" else "use its argument generator"
    _require(not moved, f"{what} draws from {' and '.join(moved)} global generator (as torch.randn does): {remedy}")


def check_class(case: CheckCase) -> str:
    """Check that the class has what every command shows, and that options and recipes are valid."""
    kind = method_class(case.config.method)
    _require(bool(kind.summary), "summary is empty: one line for procap ls methods")
    _require(not kind.colour or bool(COLOUR.fullmatch(kind.colour)), f"colour {kind.colour!r} is not like #0072b2")
    settings = kind.Options.model_config
    _require(settings.get("frozen") is True and settings.get("extra") == "forbid", "Options: model_config = STRICT")
    bare = [name for name, field in kind.Options.model_fields.items() if not field.description]
    _require(not bare, f"options without a description: {', '.join(bare)}")
    given = {kind.required_option: case.config.options[kind.required_option]} if kind.required_option else {}
    for task in TASKS:
        for shots in (1, 16):
            recipe = kind.recipe(task, shots, "imagenet")
            _require(isinstance(recipe, Recipe), f"recipe({task!r}) is not a procap.recipe.Recipe")
            filled = method_options(case.config.method, {**kind.task_options(task, shots, "imagenet"), **given})
            plain = filled.model_dump(mode="json")
            _require(method_options(case.config.method, plain) == filled, "options do not survive JSON")
    return ""


def check_start(case: CheckCase) -> str:
    """Check that equal seeds give equal initial tensors, none of which belongs to CLIP."""
    with _global_generators(1, "__init__()"):
        one = case.make_method()
    with _global_generators(2, "__init__()"):
        other = case.make_method()
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        _require(torch.equal(mine, theirs), f"{name} starts at other values under the same seed")
    frozen = {parameter.data_ptr() for parameter in one.clip.parameters()}
    shared = [name for name, parameter in one.named_parameters() if parameter.data_ptr() in frozen]
    _require(not shared, f"{', '.join(shared)} are CLIP's own: learn copies of them, see Plan.weights")
    return f"{sum(parameter.numel() for parameter in one.parameters()):,} parameters"


def check_shapes(case: CheckCase) -> str:
    """Check that loss terms are finite numbers, and that logits have a column per class."""
    method, images = case.make_method(), case.batch[0]
    terms, _ = case.step(method)
    for space in map(case.space, ("base", "novel", "all")):
        with torch.no_grad():
            found = tuple(method.classifier(space)(images[:3]).shape)
        wanted = (3, len(space.classnames))
        _require(found == wanted, f"the classifier of {wanted[1]} classes gives {found} for 3 images, not {wanted}")
    return f"loss terms: {', '.join(terms)}"


def check_inference(case: CheckCase) -> str:
    """Check that inference depends on what is learned, one tensor at least."""
    kind, method = method_class(case.config.method), case.make_method()
    replaced = {name for name in ("features", "classifier", "make_classifier") if name in _own_members(kind)}
    remedy = "inference uses plans(), image_adapter and text_adapter, or a make_classifier() of the method's own"
    _require(replaced != {"features"}, f"features() is replaced, which only loss() calls: {remedy}")
    draws, images = generator(0, "check"), case.batch[0]

    def logits_after(parameters: Iterable[Tensor]) -> Tensor:
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws).to(parameter))
        return method.classifier()(images)

    learned = learned_parameters(method)
    with torch.no_grad():
        # Every tensor first: a second factor that starts at zero hides the first.
        logits, unused = logits_after(learned.values()), []
        for name, parameter in learned.items():
            before, logits = logits, logits_after([parameter])
            unused += [name] * torch.equal(before, logits)
    _require(len(unused) < len(learned), f"no logit of the classifier depends on {', '.join(unused[:5])}: {remedy}")
    return f"in training alone: {', '.join(unused)}" if unused else ""


def _own_members(kind: type[Method]) -> set[str]:
    """Return the names that a class or its bases define below `Method`."""
    return {name for base in kind.__mro__ if issubclass(base, Method) and base is not Method for name in vars(base)}


def check_gradients(case: CheckCase) -> str:
    """Check that every learned tensor gets a finite gradient, and CLIP none."""
    method = case.make_method()
    _, gradients = case.step(method)
    wrong = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
    _require(not wrong, f"gradients of {', '.join(wrong)} are not finite")
    thawed = [name for name, parameter in method.clip.named_parameters() if parameter.grad is not None]
    _require(not thawed, f"CLIP is frozen, but a gradient reaches {', '.join(thawed[:3])}")
    zero = [name for name, gradient in gradients.items() if not gradient.any()]
    return f"zero in the first step: {', '.join(zero)}" if zero else ""


def check_determinism(case: CheckCase) -> str:
    """Check that a step gives the same terms and gradients for any state of the global random generators."""
    results = []
    for seed in (1, 2):
        method = case.make_method()
        with _global_generators(seed, "draw()"):
            method.draw(generator(case.config.seed, "noise", 0))
        with _global_generators(seed, "loss()"):
            results.append(case.step(method))
        with _global_generators(seed, "classifier()"), torch.no_grad():
            logits = [method.classifier()(case.batch[0]) for _ in range(2)]
        _require(torch.equal(*logits), "the classifier gives other logits for the same images")
    for one, other in zip(*results, strict=True):
        differ = [name for name in one if not torch.equal(one[name], other[name])]
        _require(not differ, f"two equal steps differ in {', '.join(differ)}")
    return ""


def check_training(case: CheckCase) -> str:
    """Check that two epochs in the method's recipe change what it learns."""
    start = case.make_method().state_dict()
    result = case.training
    tensors, _ = read_checkpoint(RunFolder(case.runtime.results / case.config.path).checkpoint_file)
    same = [name for name, tensor in tensors.items() if torch.equal(tensor, start[name].cpu())]
    _require(len(same) < len(tensors), f"the training has changed nothing in {result.steps} steps")
    losses = [f"{sum(epoch.terms.values()):.3f}" for epoch in result.epochs]
    return f"loss {' -> '.join(losses)}" + (f"; unchanged: {', '.join(same)}" if same else "")


def check_resume(case: CheckCase) -> str:
    """Check that a training that was paused after an epoch ends with the bits of one that was not."""
    runtime = replace(case.runtime, results=case.runtime.results / "resumed")
    train(case.config, runtime, until=1)
    again = train(case.config, runtime)
    assert isinstance(again, TrainResult)
    reason = "keep every state in parameters or buffers (register_buffer)"
    _require(again.checkpoint_sha256 == case.training.checkpoint_sha256, f"other weights after a resume: {reason}")
    method = case.make_method()
    _, gradients = case.step(method)
    with torch.no_grad():
        for name, parameter in learned_parameters(method).items():
            parameter.sub_(0.1 * gradients[name])
    for stage in range(1, len(method.stage_starts(case.training.steps))):
        method.begin_stage(stage)
    loaded = make_method(case.config, method.clip, method.space)
    loaded.load_state_dict(method.state_dict())
    images = case.batch[0]
    with torch.no_grad():
        equal = torch.equal(method.classifier()(images), loaded.classifier()(images))
    _require(equal, f"a method loaded from a checkpoint gives other logits: {reason}")
    return ""


def check_processes(case: CheckCase) -> str:
    """Check that two processes train to the losses and weights of one."""
    one, runtime = case.training, replace(case.runtime, results=case.runtime.results / "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ends = [pool.submit(_train_rank, rank, port, case.config, replace(runtime, timeout=60.0)) for rank in range(2)]
        errors = [error for end in ends if (error := end.result())]
    own = [error for error in errors if not error.startswith("rank ")]
    hint = "encode with self.features() or gather_batch, take rows of draw() by rank (docs/extending.md)"
    _require(not errors, f"{(own or errors or [''])[0]}; {hint}")
    results = [RunFolder(each.results / case.config.path) for each in (case.runtime, runtime)]
    two = results[1].train()
    assert two
    for log, other in zip(one.epochs, two.epochs, strict=True):
        for name, value in log.terms.items():
            close = abs(value - other.terms[name]) <= TERMS_TOLERANCE * max(1.0, abs(value))
            _require(close, f"{name} of epoch {log.epoch + 1}: {value:.5f}, with two {other.terms[name]:.5f}; {hint}")
    tensors = [read_checkpoint(folder.checkpoint_file)[0] for folder in results]
    for name, mine in tensors[0].items():
        distance, size = (mine - tensors[1][name]).abs().max(), mine.abs().max()
        _require(bool(distance <= WEIGHTS_TOLERANCE * size), f"{name} differs by {distance:.2g} of {size:.2g}; {hint}")
    return ""


def _train_rank(rank: int, port: int, config: RunConfig, runtime: RuntimeConfig) -> str:
    """Train as one of two processes; returns the error."""
    ranks = Ranks(rank, 2, rank, 2)
    os.environ |= ranks.environment("127.0.0.1", port)
    torch.set_num_threads(1)
    try:
        with init_process_group(ranks, torch.device("cpu"), runtime.timeout) as group:
            train(config, runtime, group=group)
    except Exception as error:
        return describe_failure(error)
    return ""


def check_evaluation(case: CheckCase) -> str:
    """Check that the trained run can be evaluated on base and on novel classes."""
    _ = case.training
    found = []
    for half in ("base", "novel"):
        result = evaluate(case.config, Target(case.config.dataset, half), replace(case.runtime, limit=100))
        found.append(f"{half} {result.accuracy:.0f} %")
    return ", ".join(found)


def check_speed(case: CheckCase) -> str:
    """Measure the classifier's images per second against those of plain CLIP, in turns."""
    method, images = case.make_method(), case.batch[0].repeat(4, 1, 1, 1)
    plain = build_method("zeroshot", method.clip, method.space, {}, generator(0, "init"))
    classifiers = [method.classifier(), plain.classifier()]
    ratios = []
    with torch.inference_mode():
        for _ in range(SPEED_ROUNDS + 1):
            moments = [time.perf_counter()]
            for classifier in classifiers:
                for _ in range(ROUND_CALLS):
                    classifier(images).sum().item()
                moments.append(time.perf_counter())
            ratios.append((moments[2] - moments[1]) / (moments[1] - moments[0]))
    # The first round warms up.
    return f"{statistics.median(ratios[1:]):.2f} of plain CLIP's images per second, a median; any share passes"


CHECKS: Mapping[str, Callable[[CheckCase], str]] = {
    "class": check_class,
    "start": check_start,
    "shapes": check_shapes,
    "inference": check_inference,
    "gradients": check_gradients,
    "determinism": check_determinism,
    "training": check_training,
    "resume": check_resume,
    "processes": check_processes,
    "novel": check_evaluation,
    "speed": check_speed,
}


def check_method(case: CheckCase, names: Iterable[str] = ()) -> Iterator[CheckResult]:
    """Carry out the checks one after the other, all of `CHECKS` by default; an error fails its check alone."""
    with tempfile.TemporaryDirectory(prefix="procap-check-") as folder:
        case = replace(case, runtime=replace(case.runtime, results=Path(folder)))
        draws_globally, first = False, dict[str, str]()
        for name in names or CHECKS:
            began, passed = time.monotonic(), False
            try:
                note, passed = CHECKS[name](case), True
            except Exception as error:
                why = describe_failure(error)
                earlier = next((first[known] for known in first if why.startswith(known)), name)
                first.setdefault(why, name)
                note = why if earlier == name else f"the same error as in {earlier}"
                draws_globally |= "global generator" in why
                if draws_globally and name in ("resume", "processes"):
                    note = "random numbers differ from those of the first training: see determinism"
            yield CheckResult(name, passed, note, time.monotonic() - began)
