"""The work that the runtime benchmark times: both modes agree, and preparing changes no training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import mark_slow
from tiny_geometry import IMAGE_METHODS, UNTRAINED

from benchmarks.runtime import measure, workload
from benchmarks.runtime.settings import make_settings, run_config
from benchmarks.runtime.synthetic import synthetic_case
from procap.weights.loading import load_clip
from runner.acceleration import Acceleration
from runner.config import RuntimeConfig
from runner.session import Session

CPU = torch.device("cpu")
PLAIN, GRAPHS = Acceleration(), Acceleration(graphs=True)


@pytest.mark.parametrize("name", mark_slow((*IMAGE_METHODS, "kdpl", "promptkd")))
def test_modes_of_every_method_give_the_same_logits_and_losses(tiny_clip, name):
    logits, losses = [], []
    for mode, clip in workload.models_by_mode(tiny_clip, PLAIN).items():
        method, images, labels = synthetic_case(clip, name, 3, 4)
        logits.append(workload.make_logits_function(method, mode)(images))
        if name not in UNTRAINED:
            training = workload.Training(method, run_config(name, "fp32", settings()), mode, PLAIN)
            losses.append(training(training.batch(images, labels, 0)).clone())
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-3)
    assert not losses or torch.allclose(*losses, rtol=1e-4, atol=1e-4)


def test_peak_memory_counts_tensors_alive_at_once():
    def work():
        first = torch.ones(250_000)
        second = first + 1
        del first
        return second * 2

    assert measure.peak_bytes(work, CPU) == pytest.approx(2_000_000, rel=1e-3)


def test_a_multiplication_and_an_addition_are_two_operations():
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    assert measure.count_flops(lambda: a @ b) == 2 * 4 * 8 * 2


def test_workloads_alternate_and_each_round_starts_with_the_next():
    order = []
    seconds = measure.time_interleaved([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert "".join(order) == "abbaab" and [len(values) for values in seconds] == [3, 3]


@pytest.fixture
def graphs_on_cpu(monkeypatch, emulated_graphs):
    """Graphs without a GPU; operations, whose count takes seconds, are not counted."""
    monkeypatch.setattr("benchmarks.runtime.workload.count_flops", lambda *_: 0.0)


def settings():
    session = Session(RuntimeConfig(Path("data"), Path("results"), device="cpu"))
    return replace(make_settings(session), batch=2, test_batch=3)


def make_training(clip, accelerations, mode="fast", name="procap"):
    method, images, labels = synthetic_case(workload.models_by_mode(clip, PLAIN)[mode], name, 5, 2)
    return workload.Training(method, run_config(name, "fp32", settings()), mode, accelerations), images, labels


def copy_weights(work):
    return [parameter.detach().clone() for parameter in work.method.parameters()]


@pytest.mark.parametrize("mode", ["reference", "fast"])
def test_preparing_changes_no_weight_and_steps_are_those_of_the_mode(tiny_clip, graphs_on_cpu, mode):
    work, images, labels = make_training(tiny_clip, GRAPHS if mode == "fast" else PLAIN, mode)
    before = copy_weights(work)
    start = work.prepare(images, labels)
    for one, other in zip(before, copy_weights(work), strict=True):
        assert torch.equal(one, other)
    assert start.peak > 0 and start.seconds > 0
    plain, *_ = make_training(tiny_clip, PLAIN)
    for number in range(2):
        terms = [each(each.batch(images, labels, number)).clone() for each in (work, plain)]
        torch.testing.assert_close(*terms, rtol=1e-4, atol=1e-5)


def test_reference_mode_has_torchs_own_optimizer_and_eager_cross_attention(tiny_clip):
    config = run_config("procap", "fp32", settings())
    models = workload.models_by_mode(tiny_clip, Acceleration(fused=True))
    assert [models[mode].fused_kernels for mode in workload.MODES] == [False, True]
    Acceleration().prepare(tiny_clip)
    method, *_ = synthetic_case(tiny_clip, "procap", 5, 2)
    groups = [workload.make_engine(method, config, mode).optimizer.param_groups[0] for mode in workload.MODES]
    assert [group["fused"] for group in groups] == [None, True]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["maple", "procap"])
def test_recorded_steps_on_a_gpu_are_plain_steps(name, caplog):
    clip = load_clip().to("cuda")
    recorded, images, labels = make_training(clip, GRAPHS, name=name)
    plain, *_ = make_training(clip, PLAIN, name=name)
    for each in (recorded, plain):
        each.prepare(images, labels)
    assert "run eagerly" not in caplog.text
    for number in range(3):
        terms = [each(each.batch(images, labels, number)).clone() for each in (recorded, plain)]
        torch.testing.assert_close(*terms, rtol=1e-4, atol=1e-5)
