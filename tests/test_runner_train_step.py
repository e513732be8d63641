"""Captured steps: replays do what plain ones do.

CUDA graphs need a GPU; on a CPU `emulated_graphs` takes their place.

Shapes: B images, S image size.
"""

import pytest
import torch
from small_runs import mark_slow, seeded
from tiny_geometry import IMAGE_METHODS, UNTRAINED

from procap.errors import UserError
from procap.methods import build_method
from runner.engine import Batch, Engine
from runner.meters import Meter
from runner.planning import plan_run
from runner.train_step import TrainStep

TRAINED = ["coop", "cocoop", "maple", "procap"]
TWO_RATES = {"logvar_lr_scale": 3.0}
"""Option of ProCAP under which its parameters are in two groups with learning rates of their own."""


def training(clip, space, name, optimizer="adamw", *, graphs=False, options=TWO_RATES, **changes):
    """An engine and its steps; `options` are ProCAP's, `changes` fields of the recipe, or the precision."""
    precision = changes.pop("precision", "fp32")
    overrides = {"optimizer": optimizer, "grad_clip": 1.0, "lr": 1e-3, **changes}
    config = plan_run(method=name, dataset="digits", recipe="procap", overrides=overrides, precision=precision)
    chosen = {"procap": options, "coprompt": {"sentences": "templates"}}.get(name, {})
    method = build_method(name, clip, space, chosen, seeded(1))
    method.begin_stage(0)
    engine = Engine(method, config)
    return method, engine.optimizer, TrainStep(engine, Meter(clip.device), graphs=graphs)


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
OTHERS = [name for name in IMAGE_METHODS if name not in (*UNTRAINED, "prograd")]
RECORDED += [pytest.param(name, "sgd", "bf16", marks=pytest.mark.slow) for name in OTHERS]


@pytest.mark.parametrize(("name", "optimizer", "precision"), RECORDED)
def test_replayed_steps_are_plain_steps(tiny_clip, tiny_space, emulated_graphs, name, optimizer, precision):
    """At new rates, and with a short batch between, which runs as it is."""
    plain = training(tiny_clip, tiny_space, name, optimizer, precision=precision)
    replayed = training(tiny_clip, tiny_space, name, optimizer, precision=precision, graphs=True)
    replayed[2].capture(batch_of(replayed[0], 99))
    for number, size in enumerate((3, 3, 2, 3)):
        terms = []
        for method, _, step in (plain, replayed):
            step.engine.set_recipe_rate(1e-3 / (number + 1))
            terms.append(step(batch_of(method, number, size)).clone())
        assert torch.equal(*terms)
        # Otherwise the graph of a step, and the nodes in it that belong to a stream, would live on.
        assert not terms[0].requires_grad and not terms[1].requires_grad
    assert emulated_graphs.captured == 2 and emulated_graphs.replayed == 6
    assert plain[2].names == replayed[2].names
    for one, other in zip(learned(*plain[:2]), learned(*replayed[:2]), strict=True):
        assert torch.equal(one, other)
    assert plain[2].engine.scaler.state_dict() == replayed[2].engine.scaler.state_dict()


@pytest.mark.parametrize("grad_clip", [None, 0.01])
def test_a_step_at_half_precision_is_one_at_full_precision_but_for_rounding(tiny_clip, tiny_space, grad_clip):
    """Clipping measures gradients that are not scaled any more: scaled ones are 1024 times as long."""
    found = []
    for precision in ("fp32", "fp16"):
        changes = {"precision": precision, "grad_clip": grad_clip}
        method, _, step = training(tiny_clip, tiny_space, "maple", "sgd", **changes)
        before = [parameter.detach().clone() for parameter in method.parameters()]
        step.engine.set_recipe_rate(1.0)
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
    method, torch_optimizer, step = training(short_clip, tiny_space, "coop", optimizer, **changes)
    plain, _, undisturbed = training(short_clip, tiny_space, "coop", optimizer, **changes)
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
        step.engine.set_recipe_rate(1e-3)
        step(batch_of(method, 0))
        changes.append({name: parameter.detach() - before[name] for name, parameter in method.named_parameters()})
    for name, change in changes[0].items():
        scale = 3 if "logvar" in name else 1
        torch.testing.assert_close(changes[1][name], scale * change, rtol=1e-3, atol=2e-6 if scale > 1 else 0)


def test_a_step_that_reads_a_number_back_is_not_captured(tiny_clip, tiny_space, emulated_graphs, monkeypatch, caplog):
    """A capture that failed would keep the memory of all later batches."""
    plain = training(tiny_clip, tiny_space, "coop")
    eager = training(tiny_clip, tiny_space, "coop", graphs=True)
    loss = type(eager[0]).loss

    def reading_loss(self, images, labels, noise):
        terms = loss(self, images, labels, noise)
        assert terms["ce"].item() > 0
        return terms

    monkeypatch.setattr(type(eager[0]), "loss", reading_loss)
    eager[2].capture(batch_of(eager[0], 99))
    assert "steps run eagerly, without CUDA graphs: the host waits for the result of aten._local_scalar" in caplog.text
    assert not emulated_graphs.captured and not eager[2].needs_capture
    one, other = (step(batch_of(method, 0)).clone() for method, _, step in (plain, eager))
    assert torch.equal(one, other)


def test_a_capture_leaves_buffers_as_they_were(tiny_clip, tiny_space, emulated_graphs):
    """Statistics of a batch norm change in every step, also of the warm-up."""
    method, _, step = training(tiny_clip, tiny_space, "coop", graphs=True)
    method.register_buffer("steps", torch.zeros(()))
    loss = method.loss
    method.loss = lambda *batch: (method.steps.add_(1), loss(*batch))[1]
    step.capture(batch_of(method, 99))
    assert step.is_captured and method.steps == 0
    step(batch_of(method, 0))
    assert method.steps == 1


def test_steps_that_combine_gradients_of_several_passes_are_not_captured(tiny_clip, tiny_space):
    assert not training(tiny_clip, tiny_space, "prograd", graphs=True)[2].needs_capture


def test_a_capture_that_fails_ends_the_run_with_a_remedy(tiny_clip, tiny_space, emulated_graphs):
    emulated_graphs.refuses = True
    refused = training(tiny_clip, tiny_space, "coop", graphs=True)
    with pytest.raises(UserError, match=r"steps cannot be captured .*: operation not permitted .*--accelerate off"):
        refused[2].capture(batch_of(refused[0], 99))


@pytest.fixture(scope="module")
def gpu_clip(tiny_geometry):
    from procap.clip import CLIP

    return CLIP.random(tiny_geometry, seed=0, name="tiny").to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", mark_slow(name for name in IMAGE_METHODS if name not in UNTRAINED))
def test_cuda_graphs_replay_what_plain_steps_do(gpu_clip, tiny_space, name, optimizer, precision):
    plain = training(gpu_clip, tiny_space, name, optimizer, precision=precision)
    replayed = training(gpu_clip, tiny_space, name, optimizer, precision=precision, graphs=True)
    if not replayed[2].needs_capture:
        pytest.skip("the method combines gradients of several passes")
    replayed[2].capture(batch_of(replayed[0], 99))
    assert replayed[2]._graphed is not None
    for number in range(5):
        terms = []
        for method, _, step in (plain, replayed):
            step.engine.set_recipe_rate(1e-3 / (number + 1))
            terms.append(step(batch_of(method, number)).clone())
        torch.testing.assert_close(*terms, rtol=1e-5, atol=1e-6)
    for one, other in zip(learned(*plain[:2]), learned(*replayed[:2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
