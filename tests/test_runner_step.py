"""Recorded steps and evaluations: replays do what plain ones do.

CUDA graphs need a GPU; elsewhere a graphs takes their place that runs each part again over the same tensors.

Shapes: B images, S image size.
"""

import pytest
import torch
from small_runs import ReplayByRunning, mark_slow, seeded
from tiny_geometry import IMAGE_METHODS

from procap.methods import METHODS, build_method
from runner.cuda_graphs import CudaGraphs, GraphedFunction
from runner.engine import Batch, Engine
from runner.meters import Meter
from runner.planning import plan_run
from runner.step import AsyncLosses, TrainStep

CPU = torch.device("cpu")
TRAINED = ["coop", "cocoop", "maple", "procap"]
TWO_RATES = {"logvar_lr_scale": 3.0}
"""Option of ProCAP under which its parameters are in two groups with learning rates of their own."""


def training(clip, space, name, graphs=None, optimizer="adamw", *, options=TWO_RATES, **changes):
    """An engine and its steps; `options` are ProCAP's, `changes` fields of the recipe, or the precision."""
    precision = changes.pop("precision", "fp32")
    overrides = {"optimizer": optimizer, "grad_clip": 1.0, "lr": 1e-3, **changes}
    config = plan_run(method=name, dataset="digits", recipe="procap", overrides=overrides, precision=precision)
    chosen = {"procap": options, "coprompt": {"sentences": "templates"}}.get(name, {})
    method = build_method(name, clip, space, chosen, seeded(1))
    method.begin_stage(0)
    engine = Engine(method, config)
    return method, engine.optimizer, TrainStep(engine, Meter(clip.device, 0), graphs)


def batch_of(method, number, size=3):
    images = torch.randn(size, 3, 32, 32, generator=seeded(10 + number))
    labels = torch.arange(size) % len(method.space.classnames)
    device = method.clip.device
    noise = tuple(noise.to(device) for noise in method.draw(seeded(20 + number)))
    return Batch(images.to(device), labels.to(device), noise)


def learned(method, optimizer):
    slots = [slot for state in optimizer.state.values() for slot in state.values()]
    return [tensor.detach().clone() for tensor in (*method.parameters(), *slots)]


RECORDED = [(name, "adamw", "fp32") for name in TRAINED] + [("coop", "sgd", "fp16")]
RECORDED += [pytest.param(name, "sgd", "fp32", marks=pytest.mark.slow) for name in IMAGE_METHODS if name != "zeroshot"]


@pytest.mark.parametrize(("name", "optimizer", "precision"), RECORDED)
def test_replayed_steps_are_plain_steps(tiny_clip, tiny_space, name, optimizer, precision):
    graphs = ReplayByRunning()
    plain = training(tiny_clip, tiny_space, name, optimizer=optimizer, precision=precision)
    replayed = training(tiny_clip, tiny_space, name, graphs, optimizer, precision=precision)
    replayed[2].capture(batch_of(replayed[0], 99))
    for number in range(3):
        terms = []
        for method, _, step in (plain, replayed):
            step.engine.scale_rates(1e-3 / (number + 1))
            terms.append(step(batch_of(method, number)).clone())
        assert torch.equal(*terms)
    assert graphs.recorded == 3 and graphs.replayed == 9
    for one, other in zip(learned(*plain[:2]), learned(*replayed[:2]), strict=True):
        assert torch.equal(one, other)
    assert plain[2].engine.scaler.state_dict() == replayed[2].engine.scaler.state_dict()


@pytest.mark.parametrize("grad_clip", [None, 0.01])
def test_a_step_at_half_precision_is_one_at_full_precision_but_for_rounding(tiny_clip, tiny_space, grad_clip):
    """Clipping measures gradients that are not scaled any more: scaled ones are 1024 times as long."""
    found = []
    for precision in ("fp32", "fp16"):
        changes = {"precision": precision, "grad_clip": grad_clip}
        method, _, step = training(tiny_clip, tiny_space, "maple", None, "sgd", **changes)
        before = [parameter.detach().clone() for parameter in method.parameters()]
        step.engine.scale_rates(1.0)
        # Gradients of this model overflow at the initial scale.
        if precision == "fp16":
            step.engine.scaler.load_state_dict(step.engine.scaler.state_dict() | {"scale": 1024.0})
        terms = step(batch_of(method, 0)).clone()
        change = [now.detach() - old for now, old in zip(method.parameters(), before, strict=True)]
        found.append((terms, torch.cat([each.flatten() for each in change])))
    (terms, change), (half_terms, half_change) = found
    torch.testing.assert_close(half_terms, terms, rtol=2e-3, atol=0.0)
    assert (half_change - change).norm() <= 2e-2 * change.norm() > 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("grad_clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_overflows_does_nothing_and_halves_the_scale(short_clip, tiny_space, optimizer, grad_clip, fused):
    """And the steps after it are those of a training without it."""
    changes = {"precision": "fp16", "grad_clip": grad_clip}
    method, torch_optimizer, step = training(short_clip, tiny_space, "coop", None, optimizer, **changes)
    plain, _, undisturbed = training(short_clip, tiny_space, "coop", None, optimizer, **changes)
    if not fused:
        torch_optimizer._step_supports_amp_scaling = False
        torch_optimizer.param_groups[0]["fused"] = None
    before = [parameter.detach().clone() for parameter in method.parameters()]
    state = step.engine.scaler.state_dict() | {"scale": 1024.0}
    undisturbed.engine.scaler.load_state_dict(state)
    step.engine.scaler.load_state_dict(state | {"scale": 2.0**127})
    assert step(batch_of(method, 0))[-1] == 1.0
    assert all(torch.equal(now, old) for now, old in zip(method.parameters(), before, strict=True))
    assert step.engine.scaler.get_scale() == 2.0**126
    step.engine.scaler.load_state_dict(state)
    for number in (1, 2):
        mine, theirs = step(batch_of(method, number)).clone(), undisturbed(batch_of(plain, number))
        assert mine[-1] == 0.0
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0.0)
    for mine, theirs in zip(method.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_log_variances_are_trained_at_a_multiple_of_the_rate(tiny_clip, tiny_space):
    """AdamW's first step is as long as the rate, whatever the gradient; all other parameters do not change with it."""
    changes = []
    for options in ({}, TWO_RATES):
        method, _, step = training(tiny_clip, tiny_space, "procap", options=options)
        before = {name: parameter.detach().clone() for name, parameter in method.named_parameters()}
        step.engine.scale_rates(1e-3)
        step(batch_of(method, 0))
        changes.append({name: parameter.detach() - before[name] for name, parameter in method.named_parameters()})
    for name, change in changes[0].items():
        scale = 3 if "logvar" in name else 1
        torch.testing.assert_close(changes[1][name], scale * change, rtol=1e-3, atol=2e-6 if scale > 1 else 0)


def test_a_batch_of_another_size_is_run_as_it_is(tiny_clip, tiny_space):
    graphs = ReplayByRunning()
    plain = training(tiny_clip, tiny_space, "maple")
    replayed = training(tiny_clip, tiny_space, "maple", graphs)
    replayed[2].capture(batch_of(replayed[0], 99))
    for number, size in enumerate((3, 2, 3)):
        one, other = (step(batch_of(method, number, size)).clone() for method, _, step in (plain, replayed))
        assert torch.equal(one, other)
    assert graphs.replayed == 6


def test_a_step_that_cannot_be_captured_runs_eagerly_with_a_warning(tiny_clip, tiny_space, caplog):
    plain = training(tiny_clip, tiny_space, "coop")
    refused = training(tiny_clip, tiny_space, "coop", ReplayByRunning(refuses=1))
    refused[2].capture(batch_of(refused[0], 99))
    assert "steps are not captured as CUDA graphs: operation not permitted" in caplog.text
    one, other = (step(batch_of(method, 0)).clone() for method, _, step in (plain, refused))
    assert torch.equal(one, other)


def test_replayed_evaluation_handles_the_short_last_batch_and_keeps_what_it_gave(tiny_clip, tiny_space):
    classify = build_method("procap", tiny_clip, tiny_space, {}, seeded(1)).classifier()
    graphs = ReplayByRunning()
    replayed = GraphedFunction(classify, graphs)
    batches = [torch.randn(size, 3, 32, 32, generator=seeded(size)) for size in (4, 4, 4, 3)]
    given = [replayed(images) for images in batches]
    assert graphs.replayed == 3
    for images, logits in zip(batches, given, strict=True):
        assert torch.equal(logits, classify(images))


def test_an_evaluation_that_cannot_be_captured_runs_eagerly_with_a_warning(tiny_clip, tiny_space, caplog):
    classify = build_method("coop", tiny_clip, tiny_space, {}, seeded(1)).classifier()
    images = torch.randn(2, 3, 32, 32, generator=seeded(2))
    assert torch.equal(GraphedFunction(classify, ReplayByRunning(refuses=0))(images), classify(images))
    assert "evaluation is not captured" in caplog.text


def test_terms_arrive_in_the_order_of_the_steps():
    arrivals = AsyncLosses(CPU)
    for number in range(3):
        arrivals.send(torch.tensor([float(number), 1.0]))
    assert len(arrivals) == 3
    assert list(arrivals.take()) == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert not len(arrivals)


@pytest.fixture(scope="module")
def gpu_clip(tiny_geometry):
    from procap.clip import CLIP

    return CLIP.random(tiny_geometry, seed=0, name="tiny").to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", mark_slow(IMAGE_METHODS[1:]))
def test_cuda_graphs_replay_what_plain_steps_do(gpu_clip, tiny_space, monkeypatch, name, optimizer, precision):
    """And no step makes the host wait: torch raises where one would."""
    plain = training(gpu_clip, tiny_space, name, optimizer=optimizer, precision=precision)
    replayed = training(gpu_clip, tiny_space, name, CudaGraphs(gpu_clip.device), optimizer, precision=precision)
    replayed[2].capture(batch_of(replayed[0], 99))
    # Prompts are laid out once, with help of the host.
    plain[2].engine.terms(batch_of(plain[0], 99))
    batches = [[batch_of(method, number) for number in range(5)] for method in (plain[0], replayed[0])]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(5):
            for (_, _, step), own, terms in zip((plain, replayed), batches, found, strict=True):
                step.engine.scale_rates(1e-3 / (number + 1))
                terms.append(step(own[number]).clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert replayed[2]._replays
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(learned(*plain[:2]), learned(*replayed[:2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_cuda_graphs_replay_evaluation(gpu_clip, tiny_space, name):
    classify = build_method(name, gpu_clip, tiny_space, {}, seeded(1)).classifier()
    replayed = GraphedFunction(classify, CudaGraphs(gpu_clip.device))
    batches = [torch.randn(size, 3, 32, 32, generator=seeded(size)).to("cuda") for size in (4, 4, 4, 3)]
    given = [replayed(images) for images in batches]
    assert replayed._replay is not None
    for images, logits in zip(batches, given, strict=True):
        torch.testing.assert_close(logits, classify(images), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_terms_arrive_late_and_in_order():
    arrivals, sent = AsyncLosses(torch.device("cuda")), torch.empty(2, device="cuda")
    seen = []
    for number in range(100):
        arrivals.send(sent.fill_(number))
        seen += list(arrivals.take())
    assert len(arrivals) <= 33
    seen += list(arrivals.take(everything=True))
    assert seen == [[float(number)] * 2 for number in range(100)]
