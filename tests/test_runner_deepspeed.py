"""DeepSpeed trains what DDP trains: equal steps, states that move between the two, and a configuration that obeys.

Two gloo processes do all the work in one start.

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
from small_runs import seeded
from tiny_geometry import GEOMETRY, SHORT_OPTIONS

from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import METHODS, build_method
from runner.checkpoint import StateFiles, TrainState
from runner.config import plan_run
from runner.deepspeed_config import deepspeed_config, read_deepspeed_json
from runner.deepspeed_engine import DeepSpeedEngine
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import Ranks
from runner.engine import Batch, Engine

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

    def engine(self, kind, run="adamw", user=None, method=None):
        group, config = ProcessGroup(self.ranks) if self.ranks.size > 1 else None, planned(run)
        method = method or method_on(self.clip, self.space, group)
        if kind == "ddp":
            engine = Engine(method, config, group)
        else:
            engine = DeepSpeedEngine(method, config, deepspeed_config(config, self.ranks.size, kind, user))
        # At this scale the first step of fp16 overflows, and the last one does not.
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 16384.0})
        return engine

    def write(self, name, terms, tensors):
        save_file({"terms": terms, **tensors}, self.folder / f"{name}-{self.ranks.rank}.safetensors")

    def train(self, name, kind, run="adamw", user=None):
        method = method_on(self.clip, self.space, ProcessGroup(self.ranks) if self.ranks.size > 1 else None, run)
        for stage in range(len(method.stage_starts(STEPS))):
            method.begin_stage(stage)
            engine = self.engine(kind, run, user, method)
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

    def refusal(self):
        try:
            self.engine(1, user={"zero_optimization": {"reduce_bucket_size": -1}})
        except UsageError as error:
            (self.folder / "refusal.txt").write_text(str(error))


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
        worker.refusal()
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
    assert "reduce_bucket_size" in (finished / "refusal.txt").read_text()
    assert (finished / "printed.txt").read_text() == ""


@pytest.mark.slow
def test_four_processes_hand_a_state_to_one(tmp_path, clip, tiny_space):
    start(tmp_path, 4, "relay")
    agree(*(found(tmp_path / "results", f"adamw-clipped-{name}") for name in ("alone", "relay")), ROUNDING)
    goes_on_alone(tmp_path / "results", clip, tiny_space)


def test_a_missing_deepspeed_is_reported_in_one_line(monkeypatch, clip, tiny_space):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"needs the package deepspeed.*--engine ddp"):
        DeepSpeedEngine(method_on(clip, tiny_space), planned(), deepspeed_config(planned(), 1))
    assert not {"DS_ACCELERATOR", "LOCAL_RANK"} & os.environ.keys()


def test_the_user_may_choose_how_deepspeed_works(tmp_path):
    """ "auto" is as if it were not there; --zero-stage takes precedence over the file."""
    (tmp_path / "ds.json").write_text(
        '{"steps_per_print": 7, "train_batch_size": "auto", "bf16": {"enabled": "auto"},'
        ' "zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": 5e8}}'
    )
    user = read_deepspeed_json(tmp_path / "ds.json")
    made = deepspeed_config(planned("adamw-clipped"), 2, None, user)
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500_000_000}
    assert made["steps_per_print"] == 7 and made["train_batch_size"] == 4 and made["zero_optimization"] == zero
    assert deepspeed_config(planned("adamw-clipped"), 2, 1, user)["zero_optimization"] == {**zero, "stage": 1}


REFUSED = [
    ({"train_batch_size": 64}, "'train_batch_size'"),
    ({"bf16": {"enabled": True}}, "'bf16'"),
    ({"zero_optimization": {"stage": 3}}, "should be 0, 1 or 2"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "'offload_optimizer'"),
    ({"zero_optimisation": {"stage": 1}}, "did you mean zero_optimization"),
    ({"steps_per_print": 0}, "steps_per_print = 0"),
]


@pytest.mark.parametrize(("user", "message"), REFUSED, ids=[json.dumps(user) for user, _ in REFUSED])
def test_other_fields_and_wrong_values_are_refused(user, message):
    with pytest.raises(UsageError) as refused:
        deepspeed_config(planned("adamw-clipped"), 2, 1, user)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "not a JSON object")])
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = tmp_path / "ds.json"
    with pytest.raises(UsageError, match="cannot read"):
        read_deepspeed_json(path)
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_deepspeed_json(path)
    path.write_text('{"steps_per_print": 5}')
    assert read_deepspeed_json(path) == {"steps_per_print": 5}
