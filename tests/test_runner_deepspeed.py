"""Runs on several processes are runs on one, with DDP and with DeepSpeed, and go on on any number.

Shapes: W processes, B images of the global batch, N rows, T loss terms.
"""

import copy
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

import conftest
import pytest
import sessions
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from small_runs import make_runtime, seeded
from tiny_geometry import GEOMETRY, SHORT_GEOMETRY, SHORT_OPTIONS, UNTRAINED, needed_options

from benchmarks.cli import main
from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import METHODS, build_method, method_class
from procap.methods.features import FeatureMethod
from procap.parallel import SHARED_FROM
from procap.text import LabelSpace
from runner import run_folders
from runner.checkpoint import StateFiles, TrainState, read_checkpoint
from runner.config import RunConfig, RuntimeConfig, Target
from runner.deepspeed_engine import DeepSpeedEngine
from runner.distributed.collectives import ProcessGroup
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import Ranks, ranks_from_environment
from runner.engine import Batch, Engine, learned_parameters
from runner.planning import plan_run
from shards import builtin_sources, catalogue, pack

BATCH = 4
STEPS = 3
RUNS = {
    "adamw-clipped": {"optimizer": "adamw", "grad_clip": 0.05},
    "sgd-clipped": {"optimizer": "sgd", "grad_clip": 0.05},
    "adamw-bf16": {"optimizer": "adamw"},
    "two-rates": {"optimizer": "sgd", "vision_lr": 1e-4},
    "two-stages": {"optimizer": "sgd"},
}
PAIRS = [("adamw-clipped", 1), ("sgd-clipped", 1), ("adamw-bf16", 2), ("two-rates", 1),
         ("two-stages", 2)]  # fmt: skip
"""Runs and stages of ZeRO."""
RESUMED = [("adamw-clipped", 1), ("sgd-clipped", 2)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two-rates": ("skipt", {"first_block": 2}),
    "two-stages": ("2sfs", {}),
    "adamw-clipped": ("procap", {"depth": 2, "logvar_lr_scale": 3.0}),
}
PROCAP = ("procap", {"depth": 2})
ROUNDING = 1e-5


def planned(run="adamw-clipped", **changes):
    overrides = {"lr": 1e-3, "batch_size": BATCH, **RUNS[run], **changes}
    precision = "bf16" if run.endswith("bf16") else "fp32"
    method, options = CASES.get(run, PROCAP)
    training = {"recipe": "procap", "overrides": overrides, "precision": precision}
    return plan_run(method=method, dataset="digits", options=options, **training)


def make_short_clip(geometry) -> CLIP:
    """Three layers a tower are enough for what is tested here."""
    return CLIP.random(replace(geometry, vision_layers=3, text_layers=3), seed=0, name="short")


def method_on(clip, space, group=None, run="adamw-clipped"):
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
        engine.set_rates([1e-3 / (number + 1) / (group + 1) for group in range(len(engine.optimizer.param_groups))])
        terms = engine.terms(batch)
        engine.backward(terms)
        engine.update()
        found.append(terms.detach())
    return torch.stack(found)


def learned(engine) -> dict[str, torch.Tensor]:
    return {f"param/{name}": value.detach().clone() for name, value in engine.method.state_dict().items()}


class Worker:
    """One process: trains everything and writes down what came out, for the tests to compare."""

    def __init__(self, folder: Path, clip, space, ranks: Ranks) -> None:
        self.folder, self.clip, self.space = folder, clip, space
        self.group = ProcessGroup(ranks) if ranks.size > 1 else None
        self.rank = ranks.rank

    def engine(self, engine, run="adamw-clipped", method=None):
        method = method or method_on(self.clip, self.space, self.group, run)
        if engine == "ddp":
            return Engine(method, planned(run), self.group)
        return DeepSpeedEngine(method, planned(run), self.group, engine)

    def write(self, name, terms, tensors):
        save_file({"terms": terms, **tensors}, self.folder / f"{name}-{self.rank}.safetensors")

    def train(self, name, engine, run="adamw-clipped"):
        method = method_on(self.clip, self.space, self.group, run)
        for stage in range(len(method.stage_starts(STEPS))):
            method.begin_stage(stage)
            running = self.engine(engine, run, method)
            terms = trained(running)
            self.write(name, terms, learned(running))
            running.close()

    def resume(self, name, engine, run):
        """Train three times two steps, each time in a new engine that loads the state on disk of the one before."""
        terms, parts = [], None
        for leg in range(3):
            running = self.engine(engine, run)
            if parts is not None:
                running.load(parts)
            terms.append(trained(running, range(2 * leg, 2 * leg + 2)))
            files = StateFiles(self.folder / f"{name}-{leg}-{self.rank}", {})
            files.save(TrainState(step=2 * leg + 2), running.state())
            parts = files.unpack(files.newest())[1]
            tensors = learned(running)
            running.close()
        self.write(name, torch.cat(terms), tensors)

    def not_finite(self):
        engine = self.engine(1)
        images = torch.full((BATCH // 2, 3, 32, 32), torch.nan)
        engine.backward(engine.terms(Batch(images, torch.arange(BATCH), engine.method.draw(seeded(1)))).sum())
        try:
            engine.update()
        except UserError as error:
            (self.folder / "not-finite.txt").write_text(str(error))
        engine.close()


def work(place: str, size: int) -> None:
    """Import DeepSpeed, which takes longer than the trainings, then fork into `size` ranks that train everything."""
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
    clip, space = make_short_clip(GEOMETRY), conftest.tiny_space.__wrapped__()
    worker = Worker(folder, clip, space, Ranks(rank, size, rank, size))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    for run in RUNS:
        worker.train(f"{run}-ddp", "ddp", run)
    for run, stage in PAIRS:
        worker.train(f"{run}-{stage}", stage, run)
    for run, stage in RESUMED:
        engine = worker.engine(stage, run)
        worker.write(f"{run}-{stage}-straight", trained(engine, range(6)), learned(engine))
        engine.close()
        worker.resume(f"{run}-{stage}-resumed", stage, run)
    worker.not_finite()
    gc.collect()
    dist.destroy_process_group()
    if rank > 0:
        # The end of an interpreter takes seconds: that of the first rank is enough.
        os._exit(0)
    Worker(folder, clip, space, Ranks()).train("single", 1)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def start(place: Path, size: int) -> str:
    """Run the ranks to their end; returns what they wrote to stderr. None may write to stdout or into its folder."""
    for name in ("results", "here", "home"):
        (place / name).mkdir()
    [end] = run_ranks(1, work, str(place), size, to_the_end=True)
    assert (end.code, end.out) == (0, ""), end.err[-3000:]
    assert not list((place / "here").iterdir()) and not list((place / "home").rglob("*torch_extensions*"))
    return end.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Results of two processes; a file by run, engine and rank."""
    folder = tmp_path_factory.mktemp("deepspeed")
    printed = start(folder, 2)
    (folder / "results" / "printed.txt").write_text(printed)
    return folder / "results"


@pytest.fixture(scope="module")
def clip(tiny_geometry) -> CLIP:
    return make_short_clip(tiny_geometry)


def found(folder, name, rank=0):
    return load_file(folder / f"{name}-{rank}.safetensors")


def agree(one, other, tolerance):
    """Terms are equal but for `tolerance` of the largest, and learned tensors but for that of the largest weight."""
    assert one.keys() == other.keys()
    largest = max(float(value.abs().max()) for name, value in one.items() if name != "terms")
    for name in one:
        limit = tolerance * (float(one[name].abs().max()) if name == "terms" else largest)
        assert float((one[name] - other[name]).abs().max()) <= limit, name


@pytest.mark.parametrize(("run", "stage"), PAIRS)
def test_steps_equal_those_of_ddp(finished, run, stage):
    """But for rounding, where a vector is cut into parts and clipped as one."""
    reference = found(finished, f"{run}-ddp")
    for rank in range(2):
        agree(reference, found(finished, f"{run}-{stage}", rank), ROUNDING)


@pytest.mark.parametrize(("run", "stage"), RESUMED)
def test_a_resumed_training_has_the_same_bits(finished, run, stage):
    for rank in range(2):
        agree(found(finished, f"{run}-{stage}-straight"), found(finished, f"{run}-{stage}-resumed", rank), 0.0)


def test_one_process_without_a_group_trains_too(finished, clip, tiny_space):
    engine = Engine(method_on(clip, tiny_space), planned())
    agree({"terms": trained(engine), **learned(engine)}, found(finished, "single"), ROUNDING)


def test_errors_are_the_only_output(finished):
    assert "not finite" in (finished / "not-finite.txt").read_text()
    assert (finished / "printed.txt").read_text() == ""


def test_fp16_is_refused(clip, tiny_space):
    config = planned().model_copy(update={"precision": "fp16"})
    with pytest.raises(UsageError, match="use --engine ddp for fp16"):
        DeepSpeedEngine(method_on(clip, tiny_space), config)


@pytest.mark.parametrize("words", [
    ["train", "--methods", "coop"],
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
    with pytest.raises(UserError, match=r"needs deepspeed.*--engine ddp"):
        DeepSpeedEngine(method_on(clip, tiny_space), planned())
    assert not {"DS_ACCELERATOR", "LOCAL_RANK"} & os.environ.keys()


CPU = torch.device("cpu")
TRAINED = "coop", "cocoop", "maple", "2sfs", "procap"
OTHERS = tuple(name for name in METHODS if name not in (*TRAINED, *UNTRAINED))
GRADIENTS = (*TRAINED, "prograd", "rebapl")
CLASSES = [SHARED_FROM - 1, SHARED_FROM + 1]
# AdamW turns a gradient that is nearly zero into a whole step of either sign, which rounding decides.
SGD = {"optimizer": "sgd", "lr": 0.01, "warmup": "none"}
QUICK = {**SGD, "epochs": 2, "batch_size": 4, "grad_clip": 1.0, "drop_last": True}
TARGETS = [Target("digits", "base"), Target("digits", "novel"), Target("scans")]


def configs(checkpoint, teacher, methods):
    """Plan a run of each method, in SGD; those on features have recipes of their own."""
    planned = []
    for method in methods:
        options = SHORT_OPTIONS.get(method, {}) | needed_options(method, teacher)
        overrides = {} if issubclass(method_class(method), FeatureMethod) else QUICK
        fields = {"dataset": "digits", "shots": 2, "backbone": checkpoint, "overrides": overrides}
        planned.append(plan_run(method=method, options=options, **fields))
    return planned


def targets_of(config: RunConfig) -> list[Target]:
    return TARGETS if method_class(config.method).knows_new_classes else TARGETS[:1]


def train_and_evaluate(data, results, *chosen):
    ranks = ranks_from_environment()
    runtime = make_runtime(data, results if ranks.is_first else f"{results}-of-{ranks.rank}")
    with init_process_group(ranks, CPU) as group:
        for config in configs(*chosen):
            result = sessions.train(config, runtime, group=group)
            counts, again = (
                [sessions.evaluate(config, target, runtime, group=group) for target in targets_of(config)]
                for _ in range(2)
            )
            assert again == counts
            repeated = sessions.train(config, runtime, group=group)
            assert repeated.model_dump(mode="json") == result.model_dump(mode="json")
            print(json.dumps([result.images, result.processes, [c.correct for c in counts]]))


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
def teacher(short_clip, tmp_path_factory) -> Path:
    """A CLIP that tells classes apart more than its students: from an equal one they diverge by rounding alone."""
    clip = copy.deepcopy(short_clip)
    clip.text.token_embedding.weight.data *= 20
    return conftest.save_clip(clip, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> RuntimeConfig:
    """One process, whose runs are kept."""
    return make_runtime(data, tmp_path_factory.mktemp("alone"))


def compare(config: RunConfig, one: Path, other: Path, tolerance: float) -> None:
    """Two results of a run: equal but for the order of sums."""
    folders = [run_folders.RunFolder(results / config.path) for results in (one, other)]
    results = [folder.read_training() for folder in folders]
    assert results[0] and results[1]
    first, second = ((result.steps, result.images, result.fewshot) for result in results)
    assert first == second
    for mine, theirs in zip(results[0].epochs, results[1].epochs, strict=True):
        # Small divergences are differences of numbers near one, in float32.
        assert mine.lr == theirs.lr and mine.terms == pytest.approx(theirs.terms, rel=tolerance, abs=1e-7)
    weights = [read_checkpoint(folder.checkpoint_file)[0] for folder in folders]
    for name, weight in weights[0].items():
        assert (weight - weights[1][name]).abs().max() <= 50 * tolerance * weight.abs().max(), name
    for target in targets_of(config):
        counts = [folder.read_evaluation(target) for folder in folders]
        assert counts[0] and counts[1]
        assert (counts[0].per_class, counts[0].total) == (counts[1].per_class, counts[1].total)
        assert counts[0].calibration and counts[1].calibration
        assert counts[0].calibration.nll == pytest.approx(counts[1].calibration.nll, rel=50 * tolerance)


@pytest.mark.parametrize(("size", "methods"), [
    (2, TRAINED), pytest.param(4, TRAINED, marks=pytest.mark.slow), pytest.param(4, OTHERS, marks=pytest.mark.slow),
])  # fmt: skip
def test_several_processes_train_and_count_as_one(data, short_checkpoint, teacher, alone, tmp_path, size, methods):
    results, chosen = tmp_path / "results", (str(short_checkpoint), str(teacher), methods)
    ends = run_ranks(size, train_and_evaluate, str(data), str(results), *chosen)
    assert [end.code for end in ends] == [0] * size, ends[0].err + ends[1].err
    assert len({end.out for end in ends}) == 1 and not list(tmp_path.glob("results-of-*"))
    for config in configs(*chosen):
        sessions.train(config, alone)
        for target in targets_of(config):
            sessions.evaluate(config, target, alone)
        compare(config, alone.results, results, 2e-5)


def gradients(name: str, classes: int, group: ProcessGroup) -> list[torch.Tensor]:
    """Terms, gradients and the weights after two steps, of a batch of 8 dealt out to the ranks of `group`."""
    clip = CLIP.random(SHORT_GEOMETRY, seed=0, name="tiny")
    space = LabelSpace(tuple("red " * (i % 4) + f"cat {i}" for i in range(classes)))
    options = SHORT_OPTIONS.get(name, {})
    method: Any = build_method(name, clip, space, options, torch.Generator().manual_seed(1))
    config = plan_run(method=name, dataset="digits", recipe="procap", options=options, overrides=SGD)
    method.group = group if group.size > 1 else None
    if name == "rebapl":
        # As in a second cycle: each step is repelled from features of the sample before.
        draw = torch.Generator().manual_seed(2)
        method._images = torch.randn(5, 3, 32, 32, generator=draw)
        method._past = torch.randn(5 + classes, 48, generator=draw)
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
        engine.backward(terms)
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


@pytest.mark.parametrize("name", GRADIENTS)
def test_every_process_has_the_gradients_of_the_global_batch(name, of_two_ranks):
    """With classes encoded by all ranks and with classes divided among them, 33 by 2."""
    for classes in CLASSES:
        check_gradients(name, classes, of_two_ranks)


def check_gradients(name, classes, of_two_ranks):
    whole = gradients(name, classes, ProcessGroup())
    parts = [torch.load(of_two_ranks / f"{name}-{classes}-{rank}.pt", weights_only=True) for rank in range(2)]
    for one, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(first, second) and (first - one).abs().max() <= 1e-4 * one.abs().max() + 1e-7
