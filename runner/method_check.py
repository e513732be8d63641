"""Check a method, most of all a plug-in, against what training, resuming, evaluation and process groups rely on."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.errors import UserError
from procap.methods import method_class
from procap.methods.features import FeatureMethod
from procap.methods.method import Method
from procap.text import LabelSpace
from runner.checkpoint import read_checkpoint
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import Ranks
from runner.engine import autocast, check_terms, learned_parameters
from runner.environment import resolve_device
from runner.failures import EXPECTED, describe_failure
from runner.feature_bank import learn_features
from runner.planning import plan_run
from runner.results import TrainResult
from runner.run_folders import RunFolder
from runner.setup import Setup, label_space, make_eval_transform, make_method, set_up
from runner.source_runs import load_teacher
from runner.train import train
from runner.workbench import Workbench
from shards.fewshot import select_class_labels
from shards.reader import open_dataset
from shards.rng import generator

EPOCHS, SHOTS, BATCH = 2, 4, 4
KEEP_STATE = "keep all state in parameters or buffers (register_buffer), and begin every stage of stage_starts()"
TOLERANCE = 1e-2
"""Largest relative difference of learned tensors between one process and two, which add in a different order."""


@dataclass(frozen=True)
class CheckResult:
    """One row of the table. note: a measurement, or why the check failed. trace: of an error that is no user's."""

    name: str
    passed: bool
    note: str
    trace: str = ""


@dataclass(frozen=True)
class CheckCase:
    """A short training of a method on the base classes of a data set, below temporary results."""

    config: RunConfig
    runtime: RuntimeConfig

    @classmethod
    def plan(
        cls, name: str, runtime: RuntimeConfig, *, dataset: str, backbone: str, options: Mapping[str, Any]
    ) -> CheckCase:
        """Plan two epochs in the method's own recipe at a tenth of its rate, in batches for two processes."""
        # A tenth of the rate, because differences by rounding grow in a training that diverges on this backbone.
        lr = method_class(name).recipe().lr / 10
        overrides = {"epochs": EPOCHS, "batch_size": BATCH, "warmup": "none", "lr": lr}
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
        """The set-up of the training, whose method has the features if it learns from them."""
        teacher, device = load_teacher(self.config, self.runtime, ProcessGroup()), resolve_device(self.runtime.device)
        setup = set_up(self.config, self.runtime, device, ProcessGroup(), Workbench(), teacher=teacher)
        is_on_features = isinstance(setup.method, FeatureMethod)
        return learn_features(setup, self.runtime, ProcessGroup()) if is_on_features else setup

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """The first batch of the training, on the device: images, or features of a method that learns from them."""
        setup = self.setup
        if isinstance(setup.method, FeatureMethod):
            return setup.method.bank.features[:BATCH, 0], setup.method.bank.labels[:BATCH]
        assert setup.schedule is not None
        images, labels = (tensor.to(setup.method.clip.device) for tensor in next(iter(setup.schedule.batches(0))))
        return setup.method.extend_batch(images, labels, generator(self.config.seed, "extend", 0))

    @cached_property
    def images(self) -> Tensor:
        """Images [4, 3, S, S] for classifiers, on the device."""
        setup = self.setup
        assert setup.fewshot is not None
        transform = make_eval_transform(setup.method.clip)
        images = [transform(setup.fewshot.train.image(i)) for i in range(BATCH)]
        return torch.stack(images).to(setup.method.clip.device)

    def space(self, classes: str) -> LabelSpace:
        """Return base, novel or all classes of the data set."""
        shards = open_dataset(self.runtime.data, self.config.dataset)
        names = tuple(shards.classnames[label] for label in select_class_labels(shards, classes))
        return label_space(shards.manifest, names)

    def make_method(self) -> Method:
        """Build the method again, ready for its first stage."""
        setup = self.setup
        method = make_method(self.config, setup.method.clip, setup.method.space)
        method.teacher_classifier = setup.method.teacher_classifier
        method.prepare_training()
        if isinstance(method, FeatureMethod) and isinstance(setup.method, FeatureMethod):
            method.bank = setup.method.bank
            method.fit(method.bank)
        method.begin_stage(0)
        return method

    def can_classify(self, classes: str) -> bool:
        """Whether the method has a rule for base, novel or all classes of the data set."""
        return self.setup.method.knows_new_classes or classes == "base"

    def step(self, method: Method) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute loss terms and gradients of the first step; there are none if no parameter requires a gradient."""
        images, labels = self.batch
        if not learned_parameters(method):
            return {}, {}
        noise = method.draw(generator(self.config.seed, "noise", 0))
        method.zero_grad(set_to_none=True)
        with autocast(self.config.precision, images.device):
            terms = method.loss(images, labels, tuple(each.to(images.device) for each in noise))
        check_terms(terms, self.config.method)
        for name, term in terms.items():
            _require(bool(torch.isfinite(term)), f"loss term {name} is not finite")
        torch.stack(list(terms.values())).sum().backward()
        learned = learned_parameters(method)
        missing = [name for name, parameter in learned.items() if parameter.grad is None]
        _require(not missing, f"no gradient reaches {', '.join(missing)}: use or freeze them (requires_grad_(False))")
        return terms, {name: parameter.grad for name, parameter in learned.items() if parameter.grad is not None}


def _require(condition: bool, reason: str) -> None:
    """Fail a check. reason: what the method does not do, and what would."""
    if not condition:
        raise UserError(reason)


def check_shapes(case: CheckCase) -> str:
    """Check that loss terms are finite numbers, and that logits have a column per class."""
    method = case.make_method()
    terms, _ = case.step(method)
    for space in map(case.space, filter(case.can_classify, ("base", "novel", "all"))):
        with torch.no_grad():
            shape = tuple(method.classifier(space)(case.images[:3]).shape)
        expected = (3, len(space.classnames))
        reason = f"the classifier of {expected[1]} classes gives {shape} for 3 images, not {expected}"
        _require(shape == expected, reason)
    return f"loss terms: {', '.join(terms)}" if terms else "learns without steps"


def check_inference(case: CheckCase) -> str:
    """Check that inference depends on what is learned, and that no function which only training calls is replaced."""
    cls, method = method_class(case.config.method), case.make_method()
    inherited = {name: getattr(Method, name, None) for name in ("features", "classifier", "make_classifier")}
    replaced = {name for name, function in inherited.items() if getattr(cls, name, None) is not function}
    remedy = "inference uses plans(), image_adapter and text_adapter, or a make_classifier() of the method's own"
    _require(replaced != {"features"}, f"features() is replaced, which only loss() calls: {remedy}")
    draws, images = generator(0, "check"), case.images

    learned = learned_parameters(method) or dict(method.named_parameters())
    with torch.no_grad():
        before = method.classifier()(images)
        for parameter in learned.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws).to(parameter))
        depends = not torch.equal(before, method.classifier()(images))
    _require(depends, f"no logit of the classifier depends on {', '.join([*learned][:5])}: {remedy}")
    return ""


def check_gradients(case: CheckCase) -> str:
    """Check that every learned tensor gets a gradient, and that none of them is CLIP's."""
    method = case.make_method()
    case.step(method)
    # By memory, because a method can register a tensor of CLIP as a new parameter.
    frozen = {parameter.data_ptr() for parameter in method.clip.parameters()}
    shared = [name for name, parameter in method.named_parameters() if parameter.data_ptr() in frozen]
    _require(not shared, f"{', '.join(shared)} are CLIP's own: learn copies of them, see Plan.weights")
    return ""


def check_determinism(case: CheckCase) -> str:
    """Check that equal seeds give equal initial tensors, terms, gradients and logits, whatever torch's own seed is."""
    starts, results = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        method = case.make_method()
        noise = {f"draw {i}": draw for i, draw in enumerate(method.draw(generator(case.config.seed, "noise", 0)))}
        starts.append(noise | dict(method.state_dict()))
        results.append(case.step(method))
        with torch.no_grad():
            logits = [method.classifier()(case.images) for _ in range(2)]
        _require(torch.equal(*logits), "the classifier gives different logits for the same images")
    remedy = "draw in draw() and __init__() with their generator, not with a global one (as torch.randn does)"
    for first, second in (starts, *zip(*results, strict=True)):
        differ = [name for name in first if not torch.equal(first[name], second[name])]
        _require(not differ, f"two equal starts or steps differ in {', '.join(differ)}: {remedy}")
    return ""


def check_resume(case: CheckCase) -> str:
    """Check that a training that was paused after an epoch ends with the bits of one that was not."""
    runtime = replace(case.runtime, results=case.runtime.results / "resumed")
    train(case.config, runtime, until=1)
    again, whole = train(case.config, runtime), train(case.config, case.runtime)
    assert isinstance(again, TrainResult) and isinstance(whole, TrainResult)
    same = again.checkpoint_sha256 == whole.checkpoint_sha256
    _require(same, f"a resumed training has different weights: {KEEP_STATE}")
    losses = [f"{sum(epoch.terms.values()):.3f}" for epoch in again.epochs]
    return f"loss {' -> '.join(losses)}" if losses else ""


def check_reloaded(case: CheckCase) -> str:
    """Check that a method that is loaded from a checkpoint classifies as the trained one, which begins stages in turn.

    A training begins no stage that it does not reach; a method that is loaded is as at the end of a training.
    """
    method, steps = case.make_method(), case.setup.steps
    for stage in range(sum(start < steps for start in method.stage_starts(steps))):
        if stage:
            method.begin_stage(stage)
        _, gradients = case.step(method)
        with torch.no_grad():
            for name, gradient in gradients.items():
                # Any change will do. Steps of one size need no learning rate that suits the method.
                method.get_parameter(name).sub_(0.01 * gradient.sign())
    if isinstance(method, FeatureMethod):
        method.finish(method.bank)
    loaded = make_method(case.config, method.clip, method.space)
    loaded.adapt_shapes(method.state_dict())
    loaded.load_state_dict(method.state_dict())
    for classes in filter(case.can_classify, ("base", "novel")):
        with torch.no_grad():
            trained, reloaded = (each.classifier(case.space(classes))(case.images) for each in (method, loaded))
        difference = (trained - reloaded).abs().max().item()
        reason = f"logits of {classes} classes differ by {difference:.2g} after a reload: {KEEP_STATE}"
        _require(torch.equal(trained, reloaded), reason)
    return ""


def check_processes(case: CheckCase) -> str:
    """Check that two processes train to the weights of one."""
    train(case.config, case.runtime)
    runtime = replace(case.runtime, results=case.runtime.results / "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ranks = [pool.submit(_train_rank, rank, port, case.config, runtime) for rank in range(2)]
        errors = [error for rank in ranks if (error := rank.result())]
    # A rank that waits for another one reports that first.
    causes = [error for error in errors if not error.startswith("rank ")]
    hint = "encode with self.features() or gather_batch, take rows of draw() by rank (docs/extending.md)"
    _require(not errors, f"{(causes or errors or [''])[0]}; {hint}")
    results = [RunFolder(each.results / case.config.path) for each in (case.runtime, runtime)]
    tensors = [read_checkpoint(folder.checkpoint_file)[0] for folder in results]
    for name, mine in tensors[0].items():
        distance, size = (mine - tensors[1][name]).abs().max(), mine.abs().max()
        _require(bool(distance <= TOLERANCE * size), f"{name} differs by {distance:.2g} of {size:.2g}; {hint}")
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


CHECKS: Mapping[str, Callable[[CheckCase], str]] = {
    "shapes": check_shapes,
    "inference": check_inference,
    "gradients": check_gradients,
    "determinism": check_determinism,
    "resume": check_resume,
    "reloaded": check_reloaded,
    "processes": check_processes,
}


def check_method(case: CheckCase, names: Iterable[str] = ()) -> Iterator[CheckResult]:
    """Carry out the checks one after the other, all of `CHECKS` by default; an error fails its check alone."""
    with tempfile.TemporaryDirectory(prefix="procap-check-") as folder:
        case = replace(case, runtime=replace(case.runtime, results=Path(folder)))
        for name in names or CHECKS:
            try:
                yield CheckResult(name, True, CHECKS[name](case))
            except Exception as error:
                trace = "" if isinstance(error, EXPECTED) else traceback.format_exc()
                yield CheckResult(name, False, describe_failure(error), trace)
