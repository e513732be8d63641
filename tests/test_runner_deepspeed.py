"""Runs on several processes are runs on one, with DDP and with DeepSpeed, and go on on any number.

Shapes: W processes, B images of the global batch, N rows, T loss terms.
"""

import gc
import importlib
import json
import os
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from small_runs import make_runtime, seeded
from tiny_geometry import GEOMETRY, SHORT_GEOMETRY, SHORT_OPTIONS

from benchmarks.cli import main
from procap.clip import CLIP
from procap.errors import UserError
from procap.methods import METHODS, build_method
from procap.parallel import SHARED_FROM
from procap.text import LabelSpace
from runner import evaluate, run_folders, train
from runner.checkpoint import StateFiles, TrainState, read_checkpoint
from runner.config import RunConfig, Target, plan_run
from runner.deepspeed_engine import DeepSpeedEngine
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import Ranks, ranks_from_environment
from runner.engine import Batch, Engine, learned_parameters
from shards import builtin_sources, catalogue, pack

BATCH = 4
STEPS = 3
RUNS = {
    "adamw": {"optimizer": "adamw"},
    "adamw-clipped": {"optimizer": "adamw", "grad_clip": 0.05},
    "sgd-clipped": {"optimizer": "sgd", "grad_clip": 0.05},
    "adamw-bf16": {"optimizer": "adamw"},
    "adamw-clipped-fp16": {"optimizer": "adamw", "grad_clip": 0.05},
    "two-rates": {"optimizer": "sgd", "vision_lr": 1e-4},
    "two-stages": {"optimizer": "sgd"},
}
STAGES = (0, 1, 2)
COMPARED = ("adamw-clipped", "sgd-clipped", "adamw-bf16", "adamw-clipped-fp16", "two-rates", "two-stages")
OTHERS = [name for name in METHODS if name not in ("zeroshot", "procap", "skipt", "2sfs")]
"""Methods with a run of their own name, at stage 2."""
PAIRS = [*product(COMPARED, STAGES), *((name, 2) for name in OTHERS)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, SHORT_OPTIONS.get(name, {})) for name in OTHERS},
    "coprompt": ("coprompt", {"depth": 2, "sentences": "templates"}),
    "two-rates": ("skipt", {"first_block": 2}),
    "two-stages": ("2sfs", {}),
    "adamw-clipped": ("procap", {"depth": 2, "logvar_lr_scale": 3.0}),
}
PROCAP = ("procap", {"depth": 2})
ROUNDING = 1e-5


def planned(run="adamw", **changes):
    overrides = {"lr": 1e-3, "batch_size": BATCH, **RUNS.get(run, {"optimizer": "sgd"}), **changes}
    precision = run[-4:] if run.endswith(("bf16", "fp16")) else "fp32"
    method, options = CASES.get(run, PROCAP)
    training = {"recipe": "procap", "overrides": overrides, "precision": precision}
    return plan_run(method=method, dataset="digits", options=options, **training)


def short_clip(geometry) -> CLIP:
    """Three layers a tower are enough for what is tested here."""
    return CLIP.random(replace(geometry, vision_layers=3, text_layers=3), seed=0, name="short")


def method_on(clip, space, group=None, run="adamw"):
    name, options = CASES.get(run, PROCAP)
    method = build_method(name, clip, space, options, seeded(1))
    method.group = group
    return method


def trained(engine, steps=range(STEPS)):
    """The terms [steps, T] of some steps, each on its share of the same global batch in all processes."""
    method, found = engine.method, []
    ranks = method.group.ranks if method.group else Ranks()
    for number in steps:
        images = torch.randn(BATCH, 3, 32, 32, generator=seeded(10 + number))
        batch = Batch(images[ranks.rank :: ranks.size], torch.arange(BATCH) % 5, method.draw(seeded(20 + number)))
        engine.set_rate(*(1e-3 / (number + 1) / (group + 1) for group in range(len(engine.optimizer.param_groups))))
        terms = engine.terms(batch)
        engine.backward(terms.sum())
        engine.update()
        found.append(terms.detach())
    return torch.stack(found)


class Worker:
    """One process: trains everything and writes down what came out, for the tests to compare."""

    def __init__(self, folder: Path, clip, space, ranks: Ranks) -> None:
        self.folder, self.clip, self.space, self.ranks = folder, clip, space, ranks

    def engine(self, kind, run="adamw", method=None):
        group, config = ProcessGroup(self.ranks) if self.ranks.size > 1 else None, planned(run)
        method = method or method_on(self.clip, self.space, group)
        if kind == "ddp":
            engine = Engine(method, config, group)
        else:
            engine = DeepSpeedEngine(method, config, self.ranks.size, kind)
        # At this scale the first step of fp16 overflows, and the last one does not.
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 16384.0})
        return engine

    def write(self, name, terms, tensors):
        save_file({"terms": terms, **tensors}, self.folder / f"{name}-{self.ranks.rank}.safetensors")

    def train(self, name, kind, run="adamw"):
        method = method_on(self.clip, self.space, ProcessGroup(self.ranks) if self.ranks.size > 1 else None, run)
        for stage in range(len(method.stage_starts(STEPS))):
            method.begin_stage(stage)
            engine = self.engine(kind, run, method)
            terms = trained(engine)
            self.write(name, terms, engine.tensors())
            self.close(engine)

    def close(self, engine):
        if isinstance(engine, DeepSpeedEngine):
            engine.close()

    def relay(self, name, kinds, run):
        """One training whose every two steps another engine does, from the state on disk of the one before."""
        terms, found = [], None
        for leg, kind in enumerate(kinds):
            engine = self.engine(kind, run)
            if found is not None:
                engine.load(found, self.folder)
            terms.append(trained(engine, range(2 * leg, 2 * leg + 2)))
            keeper = StateFiles(self.folder / f"{name}-{leg}-{self.ranks.rank}", {})
            keeper.save(TrainState(step=2 * leg + 2), engine.tensors())
            found = keeper.unpack(keeper.newest()[0])[1]
            self.close(engine)
        self.write(name, torch.cat(terms), found)

    def not_finite(self):
        engine = self.engine(1)
        images = torch.full((BATCH // self.ranks.size, 3, 32, 32), torch.nan)
        engine.backward(engine.terms(Batch(images, torch.arange(BATCH), engine.method.draw(seeded(1)))).sum())
        try:
            engine.update()
        except UserError as error:
            (self.folder / "not-finite.txt").write_text(str(error))
        self.close(engine)


def work(place: str, size: int, jobs: str) -> None:
    """Import DeepSpeed, which takes longer than the trainings, then fork into `size` ranks that do `jobs`."""
    import conftest

    folder, home = Path(place) / "results", Path(place) / "home"
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.chdir(Path(place) / "here")
    warnings.simplefilter("ignore", FutureWarning)
    # DeepSpeed imports the second one when it is initialized.
    for name in ("deepspeed", "torch._inductor.compile_fx"):
        importlib.import_module(name)
    rank, children = 0, []
    for other in range(1, size):
        child = os.fork()
        if child == 0:
            rank, children = other, []
            break
        children.append(child)
    clip, space = short_clip(GEOMETRY), conftest.tiny_space.__wrapped__()
    worker = Worker(folder, clip, space, Ranks(rank, size, rank, size))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    if jobs == "all":
        for run in (*COMPARED, *OTHERS):
            worker.train(f"{run}-ddp", "ddp", run)
        for run, stage in PAIRS:
            worker.train(f"{run}-{stage}", stage, run)
        worker.not_finite()
    for run in ("adamw-clipped", "sgd-clipped") if jobs == "all" else ("adamw-clipped",):
        worker.relay(f"{run}-relay", (2, "ddp", 1), run)
        worker.relay(f"{run}-alone", ("ddp", "ddp", "ddp"), run)
    gc.collect()
    dist.destroy_process_group()
    if jobs == "all" and rank == 0:
        Worker(folder, clip, space, Ranks()).train("single", 1)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def start(place: Path, size: int, jobs: str) -> str:
    """Run the ranks to their end; returns what they wrote to stderr. None may write to stdout or into its folder."""
    for name in ("results", "here", "home"):
        (place / name).mkdir()
    [end] = run_ranks(1, work, str(place), size, jobs, to_the_end=True)
    assert (end.code, end.out) == (0, ""), end.err[-3000:]
    assert not list((place / "here").iterdir()) and not list((place / "home").rglob("*torch_extensions*"))
    return end.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Results of two processes; a file by run, engine and rank."""
    folder = tmp_path_factory.mktemp("deepspeed")
    printed = start(folder, 2, "all")
    (folder / "results" / "printed.txt").write_text(printed)
    return folder / "results"


@pytest.fixture(scope="module")
def clip(tiny_geometry) -> CLIP:
    return short_clip(tiny_geometry)


def found(folder, name, rank=0):
    return load_file(folder / f"{name}-{rank}.safetensors")


def agree(one, other, tolerance):
    """Equal but for `tolerance` of the largest number of a kind: terms, learned tensors, or one slot of all of them."""
    assert one.keys() == other.keys()
    largest: dict[str, float] = {}
    for name, value in one.items():
        largest[kind(name)] = max(largest.get(kind(name), 0.0), float(value.abs().max()))
    for name in one:
        assert float((one[name] - other[name]).abs().max()) <= tolerance * largest[kind(name)], name


def kind(name: str) -> str:
    return name.rpartition("/")[2] if name.startswith("optim/") else name.partition("/")[0]


@pytest.mark.parametrize(("run", "stage"), PAIRS)
def test_steps_equal_those_of_ddp(finished, run, stage):
    """At stage 0 to the last bit; where a vector is cut into parts, and clipped as one, rounding differs."""
    reference = found(finished, f"{run}-ddp")
    for rank in range(2):
        agree(reference, found(finished, f"{run}-{stage}", rank), ROUNDING if stage else 0.0)
    if run.endswith("fp16"):
        assert reference["scaler/scale"] < 16384.0 and reference["scaler/growth_tracker"] > 0


@pytest.mark.parametrize("run", ["adamw-clipped", "sgd-clipped"])
def test_a_state_moves_from_deepspeed_to_ddp_and_back(finished, run):
    for rank in range(2):
        agree(found(finished, f"{run}-alone"), found(finished, f"{run}-relay", rank), ROUNDING)


def goes_on_alone(folder: Path, clip, tiny_space) -> None:
    """The state after two steps at stage 2, taken over by one plain process, ends where that one alone ends."""
    keeper = StateFiles(folder / "adamw-clipped-relay-0-0", {})
    data, source = keeper.newest()
    resumed, alone = (Engine(method_on(clip, tiny_space), planned("adamw-clipped")) for _ in range(2))
    resumed.load(keeper.unpack(data)[1], source)
    terms, all_terms = trained(resumed, range(2, 4)), trained(alone, range(4))
    agree({"terms": all_terms[2:], **alone.tensors()}, {"terms": terms, **resumed.tensors()}, 1e-4)


def test_a_state_of_two_processes_is_taken_over_by_one(finished, clip, tiny_space):
    goes_on_alone(finished, clip, tiny_space)


def test_one_process_without_a_group_trains_too(finished, clip, tiny_space):
    engine = Engine(method_on(clip, tiny_space), planned())
    agree({"terms": trained(engine), **engine.tensors()}, found(finished, "single"), ROUNDING)


def test_errors_are_the_only_output(finished):
    assert "not finite" in (finished / "not-finite.txt").read_text()
    assert (finished / "printed.txt").read_text() == ""


@pytest.mark.slow
def test_four_processes_hand_a_state_to_one(tmp_path, clip, tiny_space):
    start(tmp_path, 4, "relay")
    agree(*(found(tmp_path / "results", f"adamw-clipped-{name}") for name in ("alone", "relay")), ROUNDING)
    goes_on_alone(tmp_path / "results", clip, tiny_space)


@pytest.mark.parametrize("words", [
    ["train", "--methods", "coop"], ["train", "--methods", "coop", "--force"],
    ["bench", "base-to-novel", "--profile", "mini", "--methods", "coop", "--option", "n_ctx=4"],
    ["sweep", "--methods", "coop", "--param", "lr=0.01,0.02"],
], ids=" ".join)  # fmt: skip
def test_commands_plan_runs_of_deepspeed(words, data, short_checkpoint, tmp_path, capsys):
    engine = ["--engine", "deepspeed", "--zero-stage", "1"]
    folders = ["--data", str(data), "--results", str(tmp_path), "--backbone", str(short_checkpoint)]
    code = main([*words, "--datasets", "digits", "--shots", "1", "--epochs", "1", "--dry-run", *engine, *folders])
    assert code == 0, capsys.readouterr().err


def test_a_missing_deepspeed_is_reported_in_one_line(monkeypatch, clip, tiny_space):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"needs the package deepspeed.*--engine ddp"):
        DeepSpeedEngine(method_on(clip, tiny_space), planned(), 1)
    assert not {"DS_ACCELERATOR", "LOCAL_RANK"} & os.environ.keys()


CPU = torch.device("cpu")
TRAINED = ["coop", "cocoop", "maple", "2sfs", "procap"]
OTHER_METHODS = [name for name in METHODS if name not in (*TRAINED, "zeroshot")]
GRADIENTS = (*TRAINED, *OTHER_METHODS)
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
    runtime = make_runtime(data, results if ranks.is_first else f"{results}-of-{ranks.rank}")
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
    assert len({end.out for end in ends}) == 1 and not list(tmp_path.glob("results-of-*"))
    for config in configs(str(short_checkpoint)):
        compare(config, alone, results, 2e-5)


@pytest.mark.slow
def test_two_processes_train_and_count_as_one_with_all_other_methods(data, short_checkpoint, tmp_path):
    results = tmp_path / "results"
    ends = run_ranks(2, train_and_evaluate, str(data), str(results), str(short_checkpoint), OTHER_METHODS)
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    alone = train_alone(data, tmp_path / "alone", short_checkpoint, OTHER_METHODS)
    for config in configs(str(short_checkpoint), OTHER_METHODS):
        compare(config, alone, results, 2e-5)


def gradients(name: str, classes: int, group: ProcessGroup) -> list[torch.Tensor]:
    """Terms, gradients and the weights after two steps, of a batch of 8 dealt out to the ranks of `group`."""
    clip = CLIP.random(SHORT_GEOMETRY, seed=0, name="tiny")
    space = LabelSpace(tuple("red " * (i % 4) + f"cat {i}" for i in range(classes)))
    options = SHORT_OPTIONS.get(name, {}) | NEEDED.get(name, {})
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
        assert torch.equal(first, second) and (first - one).abs().max() <= 1e-4 * one.abs().max() + 1e-7
