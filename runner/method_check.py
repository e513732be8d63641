"""Check a method, most of all a plug-in, against what training, resuming, evaluation and process groups rely on."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

from procap.classifier import OnlineClassifier
from procap.errors import UserError
from procap.methods import method_class
from procap.methods.features import FeatureMethod
from procap.methods.hooks import GradientRule
from procap.methods.method import Method
from procap.plan import NO_CHANGE
from procap.text import LabelSpace
from runner import cuda_graphs
from runner.checkpoint import read_checkpoint
from runner.config import RunConfig, RuntimeConfig
from runner.cuda_graphs import CaptureError, CaptureTape
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import Ranks
from runner.engine import Batch, learned_parameters
from runner.feature_training import learn_from_features
from runner.meters import Meter
from runner.planning import plan_run
from runner.results import EXPECTED, TrainResult, describe_failure
from runner.session import Run, Session
from runner.setup import Setup, build_initial_method, label_space, make_test_transform, set_up
from runner.stop_signals import StopRequest
from runner.train import train_run
from runner.trained_runs import load_teacher
from shards.image_selection import select_class_labels
from shards.reader import PackedDataset
from shards.rng import generator
from shards.transfer import to_device

EPOCHS, SHOTS, BATCH = 2, 4, 4
KEEP_STATE = "keep all state in parameters or buffers (register_buffer), and begin every stage of stage_starts()"
TOLERANCE, ROUNDING = 1e-2, 1e-5
"""Largest differences between one process and two, which add in a different order: parts of the change that a tensor
has learned, and of its size."""


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

    run: Run

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @classmethod
    def plan(cls, name: str, runtime: RuntimeConfig, **chosen: Any) -> CheckCase:
        """Plan two epochs at a hundredth of the method's rate. chosen: data set, backbone, options: see `plan_run`."""
        # A hundredth of the rate, because differences by rounding grow where the loss is steep on this backbone.
        lr = method_class(name).recipe().lr / 100
        overrides = {"epochs": EPOCHS, "batch_size": BATCH, "warmup": "none", "lr": lr}
        config = plan_run(method=name, shots=SHOTS, overrides=overrides, data=runtime.data, **chosen)
        return cls(Session(runtime).get_run(config))

    def elsewhere(self, name: str) -> Run:
        """Return the same run in a folder below the results."""
        session = self.run.session
        return session.elsewhere(session.runtime.results / name).get_run(self.config)

    @cached_property
    def dataset(self) -> PackedDataset:
        return self.run.session.dataset(self.config.dataset)

    @cached_property
    def spaces(self) -> dict[str, LabelSpace]:
        """Base, novel and all classes of the data set, as far as the method has a rule for them."""
        spaces = {}
        for classes in ("base", "novel", "all") if method_class(self.config.method).knows_new_classes else ("base",):
            names = tuple(self.dataset.classnames[label] for label in select_class_labels(self.dataset, classes))
            spaces[classes] = label_space(self.dataset.manifest, names)
        return spaces

    def set_up(self) -> Setup:
        """Set up the training anew: its method is in the first stage, and has the features if it learns from them."""
        setup = set_up(self.run, teacher=load_teacher(self.run))
        if not isinstance(setup.method, FeatureMethod):
            return setup
        return learn_from_features(self.run, setup, StopRequest(), Meter(self.run.session.device))

    def batch(self, setup: Setup) -> Batch:
        """Make the first batch of the training."""
        assert setup.step_schedule is not None
        images, labels = next(to_device(setup.step_schedule.batches(0), setup.method.clip.device))
        return Batch.make(setup.method, self.config.seed, 0, images, labels)

    def step(self, setup: Setup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute loss terms and gradients of the first step; there are none if the training has no steps."""
        method, learned = setup.method, learned_parameters(setup.method)
        if setup.engine is None or setup.step_schedule is None:
            return {}, {}
        terms = setup.engine.terms(self.batch(setup))
        named = dict(zip(setup.engine.objective.names, terms, strict=True))
        for name, term in named.items():
            _require(bool(torch.isfinite(term)), f"loss term {name} is not finite")
        method.zero_grad(set_to_none=True)
        terms.sum().backward()
        missing = [name for name, parameter in learned.items() if parameter.grad is None]
        _require(not missing, f"no gradient reaches {', '.join(missing)}: use or freeze them (requires_grad_(False))")
        return named, {name: parameter.grad for name, parameter in learned.items() if parameter.grad is not None}

    @torch.no_grad()
    def logits(self, method: Method, space: LabelSpace | None = None, images: int = BATCH) -> Tensor:
        """Classify the first images of the data set: logits [images, C]."""
        transform = make_test_transform(method, self.config.dataset, self.config.seed)
        train_images = self.dataset.open_images("train")
        pixels = torch.stack([transform(train_images.image(i)) for i in range(images)])
        return method.classifier(space)(pixels.to(method.clip.device))


def _require(condition: bool, reason: str) -> None:
    """Fail a check. reason: what the method does not do, and what would."""
    if not condition:
        raise UserError(reason)


def check_shapes(case: CheckCase) -> str:
    """Check that loss terms are finite numbers, and that logits have a column per class."""
    setup = case.set_up()
    terms, _ = case.step(setup)
    for space in case.spaces.values():
        shape, expected = tuple(case.logits(setup.method, space).shape), (BATCH, len(space.classnames))
        reason = f"the classifier of {expected[1]} classes gives {shape} for {BATCH} images, not {expected}"
        _require(shape == expected, reason)
    return f"loss terms: {', '.join(terms)}" if terms else "learns without steps"


def check_inference(case: CheckCase) -> str:
    """Check that inference depends on what is learned and on class names, and calls what the method replaces."""
    cls, method = method_class(case.config.method), case.set_up().method
    rules = ("features", "classifier", "make_classifier")
    replaced = [name for name in rules if getattr(cls, name) is not getattr(Method, name)]
    remedy = "inference uses plans(), image_adapter and text_adapter, or a make_classifier() of the method's own"
    _require(replaced != ["features"], f"features() is replaced, which only loss() calls: {remedy}")
    remedy = 'its training has no labels: declare uses = DataUse(labelled="none", unlabelled="few-shot")'
    _require(not cls.learns_unlabelled or cls.uses.labelled == "none", remedy)
    before, learned = case.logits(method), learned_parameters(method) or dict(method.named_parameters())
    if isinstance(method.classifier(), OnlineClassifier):
        _require(cls.uses.unlabelled == "test", 'it adapts to test images: declare uses = DataUse(unlabelled="test")')
        difference = (before[:-1] - case.logits(method, images=BATCH - 1)).abs().max().item()
        _require(difference < 1e-3, f"logits of an image differ by {difference:.2g} without the next one of the stream")
    if not learned:
        return "learns nothing"
    with torch.no_grad():
        if method.plans(method.prompts)[1].tokens:
            # A method may have several prompts for each class, those of all classes behind each other.
            prompts = method.prompts.tokenized.subset(0, before.shape[1])
            text = F.normalize(method.clip.encode_text(prompts, NO_CHANGE))
            # Classes that CLIP alone tells apart.
            lost = (torch.pdist(text) > 1e-3) & (torch.pdist(before.T) < 1e-4)
            _require(not lost.any(), "classes have equal logits: the text plan replaces the rows of their names")
        draws = generator(0, "check")
        for parameter in learned.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws).to(parameter))
    depends = not torch.equal(before, case.logits(method))
    _require(depends, f"no logit of the classifier depends on {', '.join([*learned][:5])}: {remedy}")
    return ""


def check_gradients(case: CheckCase) -> str:
    """Check that every learned tensor gets a gradient, and that none of them is CLIP's."""
    setup = case.set_up()
    case.step(setup)
    # By memory, because a method can register a tensor of CLIP as a new parameter.
    frozen = {parameter.data_ptr() for parameter in setup.method.clip.parameters()}
    shared = [name for name, parameter in setup.method.named_parameters() if parameter.data_ptr() in frozen]
    _require(not shared, f"{', '.join(shared)} are CLIP's own: learn copies of them, see Plan.weights")
    return ""


def check_capture(case: CheckCase) -> str:
    """Say whether a GPU can replay the method's steps as CUDA graphs; it runs others eagerly, which is slower."""
    setup = case.set_up()
    if setup.engine is None:
        return ""
    if isinstance(setup.method, GradientRule):
        return "steps run eagerly: combine_gradients() takes several backward passes"
    batch = case.batch(setup)
    # What is computed once, such as the layout of prompts, may wait for the device.
    setup.engine.backward(setup.engine.terms(batch))
    try:
        with CaptureTape() as tape:
            setup.engine.backward(setup.engine.terms(batch))
    except CaptureError as error:
        watching = (str(Path(torch.__file__).parent), cuda_graphs.__file__)
        frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(watching)]
        return f"a GPU runs steps eagerly: {error} in {frames[-1].filename}, line {frames[-1].lineno}"
    return f"steps of {tape.operations} operations can be CUDA graphs"


def check_determinism(case: CheckCase) -> str:
    """Check that equal seeds give equal initial tensors, terms, gradients and logits, whatever torch's own seed is."""
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        setup = case.set_up()
        noise = setup.method.draw(generator(case.config.seed, "noise", 0))
        tensors = {f"draw {i}": draw for i, draw in enumerate(noise)} | setup.method.state_dict()
        terms, gradients = case.step(setup)
        tensors |= {f"term {name}": term for name, term in terms.items()}
        tensors |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
        starts.append(tensors | {"logits": case.logits(setup.method)})
    differ = [name for name, tensor in starts[0].items() if not torch.equal(tensor, starts[1][name])]
    remedy = "draw in draw() and __init__() with their generator, not with a global one (as torch.randn does)"
    _require(not differ, f"two equal starts or steps differ in {', '.join(differ)}: {remedy}")
    return ""


def check_resume(case: CheckCase) -> str:
    """Check that a training that was paused after an epoch ends with the bits of one that was not."""
    paused = case.elsewhere("resumed")
    train_run(paused, until=1)
    again, whole = train_run(paused), train_run(case.run)
    assert isinstance(again, TrainResult) and isinstance(whole, TrainResult)
    same = again.checkpoint_sha256 == whole.checkpoint_sha256
    _require(same, f"a resumed training has different weights: {KEEP_STATE}")
    losses = [f"{sum(epoch.terms.values()):.3f}" for epoch in again.epochs]
    return f"loss {' -> '.join(losses)}" if losses else ""


def check_reloaded(case: CheckCase) -> str:
    """Check that a method loaded from a checkpoint classifies as the trained one, which begins stages in turn."""
    setup = case.set_up()
    method = setup.method
    for stage in range(sum(start < setup.total_steps for start in method.stage_starts(setup.total_steps))):
        if stage:
            method.begin_stage(stage)
        _, gradients = case.step(setup)
        with torch.no_grad():
            for name, gradient in gradients.items():
                # Any change will do. Steps of one size need no learning rate that suits the method.
                method.get_parameter(name).sub_(0.01 * gradient.sign())
    if isinstance(method, FeatureMethod):
        method.finish(method.bank)
    loaded = build_initial_method(case.config, method.clip, method.space)
    loaded.adapt_shapes(method.state_dict())
    loaded.load_state_dict(method.state_dict())
    for classes, space in case.spaces.items():
        trained, reloaded = case.logits(method, space), case.logits(loaded, space)
        difference = (trained - reloaded).abs().max().item()
        reason = f"logits of {classes} classes differ by {difference:.2g} after a reload: {KEEP_STATE}"
        _require(torch.equal(trained, reloaded), reason)
    return ""


def check_processes(case: CheckCase) -> str:
    """Check that two processes train to the weights of one."""
    train_run(case.run)
    two_processes, port = case.elsewhere("two"), get_free_port()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        work = partial(_train_rank, port, case.config, two_processes.session.runtime)
        errors = list(pool.map(work, range(2)))
    # A rank that waits for another one reports that first.
    cause = min(filter(None, errors), key=lambda error: error.startswith("rank "), default="")
    hint = "encode with self.features() or gather_batch, take rows of draw() by rank (docs/extending.md)"
    _require(not cause, f"{cause}; {hint}")
    one, two = (read_checkpoint(run.folder.checkpoint_file)[0] for run in (case.run, two_processes))
    initial = set_up(case.run, teacher=load_teacher(case.run)).method.state_dict()
    for name in one:
        # Some are of integers.
        mine, theirs, at_first = (tensors[name].double() for tensors in (one, two, initial))
        # Tensors of features are empty at first.
        change = mine - at_first if at_first.shape == mine.shape else mine
        # Of all elements: AdamW makes a whole step of a gradient that is nearly zero, whose sign rounding decides.
        distance, learned, size = (tensor.norm() for tensor in (mine - theirs, change, mine))
        is_rounding = bool(distance <= TOLERANCE * learned + ROUNDING * size)
        _require(is_rounding, f"{name} differs by {distance:.2g} after a change of {learned:.2g}; {hint}")
    return ""


def _train_rank(port: int, config: RunConfig, runtime: RuntimeConfig, rank: int) -> str:
    """Train as one of two processes; return the error."""
    ranks = Ranks(rank, 2, rank, 2)
    os.environ |= ranks.environment("127.0.0.1", port)
    torch.set_num_threads(1)
    try:
        with init_process_group(ranks, torch.device("cpu"), runtime.timeout) as group:
            train_run(Session(runtime, group).get_run(config))
    except Exception as error:
        return describe_failure(error)
    return ""


CHECKS: Mapping[str, Callable[[CheckCase], str]] = {
    "shapes": check_shapes,
    "inference": check_inference,
    "gradients": check_gradients,
    "capture": check_capture,
    "determinism": check_determinism,
    "resume": check_resume,
    "reloaded": check_reloaded,
    "processes": check_processes,
}


def check_method(case: CheckCase, names: Iterable[str] = ()) -> Iterator[CheckResult]:
    """Carry out the checks one after the other, all of `CHECKS` by default; an error fails its check alone."""
    with tempfile.TemporaryDirectory(prefix="procap-check-") as folder:
        case = CheckCase(case.run.session.elsewhere(Path(folder)).get_run(case.config))
        for name in names or CHECKS:
            try:
                yield CheckResult(name, True, CHECKS[name](case))
            except Exception as error:
                trace = "" if isinstance(error, EXPECTED) else traceback.format_exc()
                yield CheckResult(name, False, describe_failure(error), trace)
