"""The work that the runtime benchmark times: both modes agree, and starting changes no training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from benchmarks.cli import main
from benchmarks.runtime.data import class_names, prepare
from benchmarks.runtime.flops import without_fused_kernels
from benchmarks.runtime.measure import Spread, peak_bytes, time_in_turns
from benchmarks.runtime.rounds import Clock, affordable_steps
from benchmarks.runtime.settings import Flags, make_settings, run_config
from benchmarks.runtime.sizes import Point, measure_accelerations, measure_points
from benchmarks.runtime.workload import (
    MODES,
    Evaluation,
    Training,
    compile_cache,
    make_classifier,
    make_engine,
    models_by_mode,
    synthetic_case,
)
from procap.methods import build_method
from procap.methods.procap import EUROSAT_JITTER, EUROSAT_ROTATION
from procap.text import LabelSpace
from procap.weights.mini import load_mini
from runner.acceleration import Acceleration
from runner.config import RuntimeConfig
from runner.cuda_graphs import Part
from runner.meters import Meter

CPU = torch.device("cpu")
PLAIN, GRAPHS = Acceleration(), Acceleration(graphs=True)


@pytest.fixture(scope="module")
def mini():
    return load_mini()


def build(clip, name, classes=5):
    options = {"n_ctx": 4} if name == "maple" else {}
    return build_method(name, clip, LabelSpace(class_names(classes)), options, torch.Generator().manual_seed(0))


def random_images(clip, count):
    size = clip.geometry.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["zeroshot", "coop", "cocoop", "maple", "procap"])
def test_modes_give_the_same_logits(mini, name):
    images = random_images(mini, 4)
    models = models_by_mode(mini, PLAIN)
    logits = [make_classifier(build(models[mode], name), mode)(images) for mode in MODES]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-3)


def test_peak_memory_counts_tensors_alive_at_once():
    def work():
        first = torch.ones(250_000)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(work, CPU) == pytest.approx(2_000_000, rel=1e-3)


def test_workloads_take_turns_and_start_in_turns():
    order = []
    seconds = time_in_turns([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert "".join(order) == "abbaab"
    assert [len(values) for values in seconds] == [3, 3]


def test_spread_of_rates_turns_the_order_round():
    spread = Spread.of([1.0, 4.0, 2.0])
    assert spread == Spread(2.0, 1.0, 4.0, 3)
    assert spread.rate(8) == Spread(4.0, 2.0, 8.0, 3)


# --- accelerations ----------------------------------------------------------------------------------------------------


class Again:
    """In the place of CUDA graphs: replays a part by running it once more."""

    refuses = False

    def __init__(self, device: torch.device) -> None:
        pass

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def capture(self, part: Part) -> Part:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        return part


@pytest.fixture
def again(monkeypatch):
    monkeypatch.setattr("benchmarks.runtime.workload.CudaGraphs", Again)


def settings(**changes):
    return replace(
        make_settings(Flags(repeats=1, batch=2, test_batch=3), RuntimeConfig(Path("data"), Path("results")), CPU),
        **changes,
    )


def test_every_data_set_is_augmented_as_its_recipe_has_it(tmp_path):
    recipe = run_config("maple", "fp32", settings(), dataset="eurosat").recipe
    assert (recipe.colour_jitter, recipe.rotation) == (EUROSAT_JITTER, EUROSAT_ROTATION)
    made = run_config(
        "maple", "fp32", settings(), dataset="photographs-1", data=prepare("photographs-1", CPU, tmp_path)
    )
    assert made.dataset == "photographs-1" and made.recipe.colour_jitter == 0


def training(clip, ways, mode="fast", name="procap"):
    method, images, labels = synthetic_case(models_by_mode(clip, PLAIN)[mode], name, 5, 2)
    work = Training(method, run_config(name, "fp32", settings()), mode, ways, Meter(clip.device, 0))
    return work, images, labels


def learned(work):
    return [parameter.detach().clone() for parameter in work.method.parameters()]


@pytest.mark.parametrize("mode", ["reference", "fast"])
def test_starting_changes_no_weight_and_steps_are_those_of_the_mode(tiny_clip, again, mode):
    work, images, labels = training(tiny_clip, GRAPHS if mode == "fast" else PLAIN, mode)
    before = learned(work)
    start = work.start(work.batch(images, labels, 0))
    for one, other in zip(before, learned(work), strict=True):
        assert torch.equal(one, other)
    assert work.recorded == (mode == "fast")
    assert start.peak > 0 and start.seconds >= start.once > 0
    plain, *_ = training(tiny_clip, PLAIN)
    for number in range(2):
        terms = [each(each.batch(images, labels, number)).clone() for each in (work, plain)]
        assert number or float(terms[0][-1]) == pytest.approx(start.loss, rel=1e-5)
        torch.testing.assert_close(*terms, rtol=1e-4, atol=1e-5)


def test_what_could_not_be_recorded_is_known(tiny_clip, again, monkeypatch):
    monkeypatch.setattr(Again, "refuses", True)
    work, images, labels = training(tiny_clip, GRAPHS)
    work.start(work.batch(images, labels, 0))
    assert not work.recorded
    assert math.isfinite(float(work(work.batch(images, labels, 0))[-1]))


def test_recorded_evaluation_is_plain_evaluation(tiny_clip, again):
    method, images, _ = synthetic_case(tiny_clip, "procap", 5, 3)
    config = run_config("procap", "fp32", settings())
    plain, recorded = (Evaluation(method, config, "fast", ways) for ways in (PLAIN, GRAPHS))
    for each in (plain, recorded):
        each.start(images, rest=1)
        each.renew()
    assert recorded.recorded and not plain.recorded
    for batch in (images, images[:1], images.flip(0)):
        assert torch.equal(plain(batch), recorded(batch))


def test_reference_mode_has_torchs_own_optimizer_and_eager_cross_attention(tiny_clip, monkeypatch):
    monkeypatch.delenv("PROCAP_FUSED", raising=False)
    config = run_config("procap", "fp32", settings())
    method, *_ = synthetic_case(tiny_clip, "procap", 5, 2)
    groups = [make_engine(method, config, mode).optimizer.param_groups[0] for mode in MODES]
    assert [group["fused"] for group in groups] == [None, True]
    assert groups[0]["lr"] == config.recipe.lr and not groups[0]["capturable"]
    with without_fused_kernels():
        assert os.environ["PROCAP_FUSED"] == "off"
    assert "PROCAP_FUSED" not in os.environ


def test_only_the_fast_model_is_compiled():
    """Reference mode then has weights of its own, equal ones; else both modes share them."""
    clip = load_mini()
    shared, own = models_by_mode(clip, PLAIN), models_by_mode(clip, Acceleration(compile=True))
    assert shared["reference"].visual.proj is shared["fast"].visual.proj
    assert own["reference"].visual.proj is not own["fast"].visual.proj
    assert torch.equal(own["reference"].visual.proj, own["fast"].visual.proj)
    blocks = [own[mode].visual.transformer.resblocks[0] for mode in ("reference", "fast")]
    assert ["before_attention" in vars(block) for block in blocks] == [False, True]


def test_the_cache_of_compiled_programs_is_cold_until_something_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    ways = Acceleration(compile=True)
    assert compile_cache(PLAIN) is None
    assert compile_cache(ways) == {"folder": str(tmp_path / "compiled"), "state": "cold"}
    (tmp_path / "compiled").mkdir()
    assert compile_cache(ways)["state"] == "cold"
    (tmp_path / "compiled" / "fxgraph").touch()
    assert compile_cache(ways)["state"] == "warm"


def test_accelerations_are_compared_with_none(tiny_clip, again, monkeypatch):
    monkeypatch.setattr("benchmarks.runtime.sizes.ABLATION_CLASSES", 5)
    lines: list[str] = []
    models = models_by_mode(tiny_clip, PLAIN)
    rows = measure_accelerations(models, settings(accelerations=GRAPHS), {"fp32": 1e11}, None, lines.append)
    assert [(one["kind"], one["accelerations"], one["recorded"]) for one in rows] == [
        (kind, name, name == "graphs") for kind in ("train", "eval") for name in ("off", "graphs")
    ]
    assert [one["gain"] for one in rows if one["accelerations"] == "off"] == [1.0, 1.0]
    assert all(sum(one["attention"].values()) >= 12 for one in rows) and len(lines) == 2


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_sizes_are_measured_in_both_modes(tiny_clip, again, kind):
    models = models_by_mode(tiny_clip, GRAPHS)
    (one,) = measure_points(
        models, "procap", [Point(kind, 5, 2)], settings(accelerations=GRAPHS), 1, None, lambda line: None
    )
    assert one["recorded"] and one["backbone"] == "tiny"
    assert one["counted"] == one["flops"]["reference"] / one["flops"]["fast"] > 1
    assert all(one["seconds"][mode]["median"] > 0 and one["starts"][mode] > 0 for mode in MODES)


# --- turns ------------------------------------------------------------------------------------------------------------


COSTS = st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=6)


@examples(deadline=None)
@given(costs=COSTS, wanted=st.integers(1, 600), seconds=st.floats(0.0, 5000.0))
def test_short_trainings_are_whole_and_long_ones_share_what_is_left(costs, wanted, seconds):
    steps = affordable_steps(costs, wanted, seconds)
    assert all(1 <= count <= wanted for count in steps)
    # One step of each is taken in any case.
    assert sum(count * cost for count, cost in zip(steps, costs, strict=True)) <= seconds + sum(costs) + 1e-6
    assert all(
        count == wanted
        for count, cost in zip(steps, costs, strict=True)
        if cost * wanted < 0.999 * seconds / len(costs)
    )
    assert affordable_steps(costs, wanted, None) == [wanted] * len(costs)


def test_the_clock_leaves_starts_out_but_not_beyond_the_limit(monkeypatch):
    monkeypatch.setattr("benchmarks.runtime.rounds.time", SimpleNamespace(perf_counter=lambda: 7.0))
    clock = Clock(budget=100.0, limit=130.0, began=4.0)
    assert clock.left(0.5) == 50 - 3
    clock.excluded = 40.0
    assert clock.left(0.5) == 90 - 3
    assert clock.left() == 130 - 3
    assert Clock(None).left() is None


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["maple", "procap"])
def test_recorded_steps_on_a_gpu_are_plain_steps(name):
    clip = load_mini().to("cuda")
    recorded, images, labels = training(clip, GRAPHS, name=name)
    plain, *_ = training(clip, PLAIN, name=name)
    for each in (recorded, plain):
        each.start(each.batch(images, labels, 0))
    assert recorded.recorded
    for number in range(3):
        terms = [each(each.batch(images, labels, number)).clone() for each in (recorded, plain)]
        torch.testing.assert_close(*terms, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_check_on_a_gpu_in_small(capsys, tmp_path):
    flags = ("--check", "--backbone", "mini", "--precision", "bf16", "--datasets", "photographs-3", "--budget", "20")
    place = ("--epochs", "2", "--batch", "8", "--scaling", "10x8", "--tracking", "off", "--results", str(tmp_path))
    assert main(["bench", "runtime", *flags, *place]) == 0
    out = capsys.readouterr().out
    assert "All of fast mode was recorded." in out and "compile + graphs" in out and "FAILED" not in out
