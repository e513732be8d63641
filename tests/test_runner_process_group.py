"""A run on several processes is the run on one: loss terms, weights, picks, counts; and it goes on on any number."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from small_runs import make_runtime
from tiny_geometry import SHORT_GEOMETRY, SHORT_OPTIONS

from procap.clip import CLIP
from procap.methods import METHODS, build_method
from procap.parallel import SHARED_FROM
from procap.text import LabelSpace
from runner import evaluate, run_folders, train
from runner.checkpoint import read_checkpoint
from runner.config import RunConfig, Target, plan_run
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.engine import Batch, Engine, learned_parameters
from shards import builtin_sources, catalogue, pack

CPU = torch.device("cpu")
TRAINED = ["coop", "cocoop", "maple", "2sfs", "procap"]
OTHERS = [name for name in METHODS if name not in (*TRAINED, "zeroshot")]
GRADIENTS = (*TRAINED, *OTHERS)
NEEDED: dict[str, dict[str, Any]] = {"coprompt": {"sentences": "templates"}}
CLASSES = [SHARED_FROM - 1, SHARED_FROM + 1]
# AdamW turns a gradient that is nearly zero into a whole step of either sign, which rounding decides.
SGD = {"optimizer": "sgd", "lr": 0.01, "warmup": "none"}
TARGETS = [Target("digits", "base"), Target("digits", "novel"), Target("scans")]


def configs(checkpoint, methods=TRAINED):
    overrides = {**SGD, "epochs": 2, "batch_size": 4, "grad_clip": 1.0, "drop_last": True}
    more: dict[str, Any] = {"dataset": "digits", "shots": 2, "backbone": checkpoint, "overrides": overrides}
    options = {method: SHORT_OPTIONS.get(method, {}) | NEEDED.get(method, {}) for method in methods}
    return [plan_run(method=method, options=options[method], **more) for method in methods]


def train_and_evaluate(data, results, checkpoint, methods=TRAINED):
    ranks = ranks_from_environment()
    runtime = make_runtime(data, results if ranks.first else f"{results}-of-{ranks.rank}")
    with init_process_group(ranks, CPU) as group:
        for config in configs(checkpoint, methods):
            result = train.train(config, runtime, group=group)
            counts = [evaluate.evaluate(config, target, runtime, group=group) for target in TARGETS]
            again = [evaluate.evaluate(config, target, runtime, group=group) for target in TARGETS]
            assert again == counts
            assert train.train(config, runtime, group=group).model_dump(mode="json") == result.model_dump(mode="json")
            print(json.dumps([result.images, result.ranks and len(result.ranks), [c.correct for c in counts]]))


def train_alone(data, results, checkpoint, methods=TRAINED):
    runtime = make_runtime(str(data), str(results))
    for config in configs(str(checkpoint), methods):
        train.train(config, runtime)
        for target in TARGETS:
            evaluate.evaluate(config, target, runtime)
    return results


@pytest.fixture(scope="module")
def data(few_digits, tmp_path_factory) -> Path:
    """The digits, and another data set with other class names, to which what is learned is transferred."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "digits").symlink_to(few_digits / "digits")
    source, counts = builtin_sources.builtin_source(catalogue.find("digits")), {"train": 60, "val": 10, "test": 40}
    names = tuple(f"drawing of {name}" for name in source.classnames)
    pack.pack_source(replace(source, name="scans", classnames=names, counts=counts), folder)
    return folder


@pytest.fixture(scope="module")
def alone(data, short_checkpoint, tmp_path_factory) -> Path:
    return train_alone(data, tmp_path_factory.mktemp("alone"), short_checkpoint)


def compare(config: RunConfig, one: Path, other: Path, tolerance: float) -> None:
    """Two results of a run: equal but for the order of sums."""
    folders = [run_folders.RunFolder(results / config.path) for results in (one, other)]
    results = [folder.train() for folder in folders]
    assert results[0] and results[1]
    first, second = ((result.steps, result.images, result.fewshot) for result in results)
    assert first == second
    for mine, theirs in zip(results[0].epochs, results[1].epochs, strict=True):
        assert mine.lr == theirs.lr and mine.terms == pytest.approx(theirs.terms, rel=tolerance)
    weights = [read_checkpoint(folder.checkpoint_file)[0] for folder in folders]
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().max() <= 50 * tolerance * weight.abs().max(), name
    for target in TARGETS:
        counts = [folder.evaluation(target) for folder in folders]
        assert counts[0] and counts[1]
        assert (counts[0].per_class, counts[0].total) == (counts[1].per_class, counts[1].total)
        assert counts[0].calibration and counts[1].calibration
        assert counts[0].calibration.nll == pytest.approx(counts[1].calibration.nll, rel=50 * tolerance)


@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_train_and_count_as_one(data, short_checkpoint, alone, tmp_path, size):
    results = tmp_path / "results"
    arguments = str(data), str(results), str(short_checkpoint)
    ends = run_ranks(size, train_and_evaluate, *arguments)
    assert [end.code for end in ends] == [0] * size, ends[0].err + ends[1].err
    assert len({end.out for end in ends}) == 1
    assert not list(tmp_path.glob("results-of-*"))
    for config in configs(str(short_checkpoint)):
        compare(config, alone, results, 2e-5)


@pytest.mark.slow
def test_two_processes_train_and_count_as_one_with_all_other_methods(data, short_checkpoint, tmp_path):
    results = tmp_path / "results"
    ends = run_ranks(2, train_and_evaluate, str(data), str(results), str(short_checkpoint), OTHERS)
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    alone = train_alone(data, tmp_path / "alone", short_checkpoint, OTHERS)
    for config in configs(str(short_checkpoint), OTHERS):
        compare(config, alone, results, 2e-5)


def gradients(name: str, classes: int, group: ProcessGroup) -> list[torch.Tensor]:
    """Terms, gradients and the weights after two steps, of a batch of 8 dealt out to the ranks of `group`."""
    clip = CLIP.random(SHORT_GEOMETRY, seed=0, name="tiny")
    space = LabelSpace(tuple("red " * (i % 4) + f"cat {i}" for i in range(classes)))
    needed = {"coop": {"csc": True, "ctx_init": ""}, **NEEDED}
    options = SHORT_OPTIONS.get(name, {}) | needed.get(name, {})
    method: Any = build_method(name, clip, space, options, torch.Generator().manual_seed(1))
    config = plan_run(method=name, dataset="digits", recipe="procap", options=options, overrides=SGD)
    method.group = group if group.size > 1 else None
    found: list[torch.Tensor] = []
    for step in range(2):
        # A method with two stages trains each of them for a step.
        if step < len(method.stage_starts(2)):
            method.begin_stage(step)
            engine = Engine(method, config, group)
        views = (method.views,) * (method.views > 1)
        images = torch.randn(8, *views, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        noise = method.draw(torch.Generator().manual_seed(10 + step))
        labels = torch.arange(8) * 5 % classes
        terms = engine.terms(Batch(images[group.rank :: group.size], labels, noise))
        engine.backward(terms.sum())
        found += [terms.detach(), *(parameter.grad.clone() for parameter in learned_parameters(method).values())]
        engine.update()
    return found + [parameter.detach() for parameter in method.parameters()]


def write_gradients(folder: str) -> None:
    with init_process_group(ranks_from_environment(), CPU) as group:
        for name, classes in product(GRADIENTS, CLASSES):
            torch.save(gradients(name, classes, group), Path(folder) / f"{name}-{classes}-{group.rank}.pt")


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory) -> Path:
    """The gradients that each of two ranks has, a file by method, classes and rank."""
    folder = tmp_path_factory.mktemp("gradients")
    ends = run_ranks(2, write_gradients, str(folder))
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    return folder


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_process_has_the_gradients_of_the_global_batch(name, classes, of_two_ranks):
    """With classes encoded by all ranks and with classes divided among them, 33 by 2."""
    whole = gradients(name, classes, ProcessGroup())
    parts = [torch.load(of_two_ranks / f"{name}-{classes}-{rank}.pt", weights_only=True) for rank in range(2)]
    for one, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(first, second)
        assert (first - one).abs().max() <= 1e-4 * one.abs().max() + 1e-7
