"""PromptKD and CasPL, which learn from a teacher on images without labels, equal their public code."""

from types import SimpleNamespace

import numpy as np
import public_code
import pytest
import torch
from public_code import CLASSNAMES, LABELS, draws, figures_of, images, near, near_condensed, small_clip, take_steps
from small_runs import mark_slow

from procap.classifier import cosine_logits
from procap.errors import UsageError
from procap.methods.public import public_names, public_parameters
from procap.text import LabelSpace
from runner.engine import Batch, Engine
from runner.planning import plan_run
from shards.catalogue import CATALOGUE


def learned_of(method):
    """The parameters by their public names, without buffers."""
    named = public_parameters(method).items()
    return {name: tensor for name, tensor in named if isinstance(tensor, torch.nn.Parameter)}


def built_promptkd():
    method = public_code.build("promptkd", depth=3, teacher="a run")

    def std(name, shape):
        return 0.2 if name.endswith("1.weight") else shape[1] ** -0.5 if name.endswith("weight") else 0.1

    parameters = learned_of(method)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for name, values in public_code.walk(shapes, lambda name: std(name, shapes[name])).items():
        parameters[name].data.copy_(values + name.endswith("conv1.1.weight"))
    return method


def with_inputs(method):
    """Give the method the teacher of the figures: class features, and logits of the five images."""
    source = draws(41)
    image, text = (source.standard_normal((count, 768), dtype=np.float32) for count in (5, 9))
    image, text = (features / np.linalg.norm(features, axis=1, keepdims=True) for features in (image, text))
    method.class_features = torch.from_numpy(text)
    method.teacher_classifier = SimpleNamespace(
        encode=lambda pixels: torch.from_numpy(image), logits=lambda features: 80 * features @ method.class_features.T
    )
    return method


def test_promptkd_equals_the_public_code():
    figures, method = figures_of("promptkd"), with_inputs(built_promptkd())
    halves = [LabelSpace(CLASSNAMES[:5]), LabelSpace(CLASSNAMES[5:])]
    for half, name in zip(halves, ("base", "novel"), strict=True):
        near(method.classifier(half)(images()), figures[f"eval_{name}_logits_at_the_start"])
    engine = Engine(method, plan_run(method="promptkd", dataset="ucf101", options={"teacher": "mini"}))
    batches, losses = [Batch(images(), torch.full_like(LABELS, -1), ())] * 3, figures["steps/loss"]
    gradients = {}
    for step, _ in take_steps(engine, batches, 1e-5, losses):
        if not step:
            gradients = {name: tensor.grad.clone() for name, tensor in learned_of(method).items()}
    # The batch norm removes the first bias from the loss: its gradient is rounding.
    largest = gradients["VPT_image_trans.conv1.0.weight"]
    for name, gradient in gradients.items():
        near_condensed(gradient, figures[f"grad/{name}"]) if "conv1.0.bias" not in name else None
    assert gradients["VPT_image_trans.conv1.0.bias"].abs().max() < 1e-4 * largest.abs().max()
    for name, tensor in learned_of(method).items():
        near_condensed(tensor, figures[f"steps/after_3/{name}"])
    near(method.image_adapter[1].running_mean, figures["steps/running_mean"])
    near(method.image_adapter[1].running_var, figures["steps/running_var"])
    for half, name in zip(halves, ("base", "novel"), strict=True):
        near(method.classifier(half)(images()), figures[f"eval_{name}_logits"])
    near(method.classifier()(images()), figures["cross/eval_logits"])


@pytest.mark.slow
def test_promptkd_learns_from_a_tuned_promptsrc_as_the_public_code():
    figures, method = figures_of("promptkd"), built_promptkd()
    clip = small_clip(embed=768, seed=8, scale=50.0)
    teacher = public_code.build("promptsrc", clip=clip, depth=4, vision_depth=4)
    public_code.load_public(teacher, public_code.walk(public_code.shapes_of(teacher), lambda name: 0.1, seed=53))
    method.set_teacher(teacher.classifier)
    method.prepare_training()
    near(method.teacher_logits(images()), figures["teacher/base2novel/logits"])
    terms = method.loss(images(), torch.full_like(LABELS, -1), ())
    near(terms["kl"].detach(), figures["real/loss/total"])
    terms["kl"].backward()
    near_condensed(method.tokens[0].grad, figures["real/grad/image_encoder.VPT"])
    narrow = public_code.build("promptkd", depth=3, width=512, teacher="a run")
    narrow.set_teacher(teacher.classifier)
    with pytest.raises(UsageError, match=r"width = 512, but features of the teacher .* have 768"):
        narrow.prepare_training()


HOSTS = {
    "coop": ("caspl", {"n_ctx": 4}, 0.002),
    "maple": ("caspl-maple", {"n_ctx": 4, "depth": 2}, 0.0035),
    "promptsrc": ("caspl-promptsrc", {"n_ctx": 4, "vision_tokens": 4, "depth": 3, "vision_depth": 3}, 0.0025),
}


def built_boosting():
    method = public_code.build("caspl-boost", boost_tokens=5, boost_depth=3, teacher="a run")
    public_code.load_public(method, public_code.walk(public_code.shapes_of(method), lambda name: 0.1, seed=17))
    source = draws(41)
    image, text = (torch.from_numpy(source.standard_normal((count, 768), dtype=np.float32)) for count in (5, 9))
    method.teacher_classifier = SimpleNamespace(
        encode=lambda pixels: image, logits=lambda features: cosine_logits(features, text, method.scale())
    )
    return method


def built_boosted(host):
    name, options, _ = HOSTS[host]
    method, boosting = public_code.build(name, boost_tokens=5, boost_depth=3, **options), built_boosting()
    if host == "maple":
        maple = public_code.build("maple", n_ctx=4, depth=2)
        public_code.load_maple(maple)
        own = maple.state_dict()
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in learned_of(method).items()}
        theirs = public_code.walk(shapes, lambda name: 0.1)
        own = {ours: theirs[name] for ours, name in public_names(method).items() if name in theirs}
    method.load_state_dict({**own, **boosting.state_dict()})
    return method


def train_as_public(method, prefix, rate, labels):
    """Take the three steps of the figures: logits, loss and gradients before them agree, and values behind them."""
    figures, start = figures_of("caspl"), {name: each.detach().clone() for name, each in learned_of(method).items()}
    novel = LabelSpace(tuple(map(str, figures["aux/novel_classnames"])))
    for name, space in (("eval", method.space), ("novel", novel)):
        near(method.classifier(space)(images()), figures[f"{prefix}/{name}_logits"])
    engine = Engine(method, plan_run(method="caspl", dataset="ucf101", options={"teacher": "mini"}))
    for step, terms in take_steps(engine, [Batch(images(), labels, ())] * 3, rate, figures[f"{prefix}/steps/loss"]):
        if not step:
            named = dict(zip(engine.objective.names, terms, strict=True))
            for name, tensor in learned_of(method).items():
                near_condensed(tensor.grad, figures[f"{prefix}/grad/{name}"])
    for name, tensor in learned_of(method).items():
        if (key := f"{prefix}/steps/after_3/{name}") in figures:
            near_condensed(tensor, figures[key], like=start[name])
    return named


def test_boosting_of_caspl_equals_the_public_code():
    figures, method = figures_of("caspl"), built_boosting()
    near(method.teacher_logits(images()), figures["boost/teacher_logits"])
    terms = train_as_public(method, "boost", 0.0025, torch.full_like(LABELS, -1))
    near(5 * terms["kl"], figures["boost/loss/kl_sum"])
    assert torch.equal(method.prompts.ids, torch.from_numpy(figures["boost/token_ids"]))
    # The last two are no data sets of their own.
    for dataset, template in public_code.by_dataset(figures["rule/templates"][:-2]).items():
        assert CATALOGUE[dataset].template == template


@pytest.mark.parametrize("host", mark_slow(HOSTS, ("coop", "maple")))
def test_methods_beside_boosting_tokens_equal_the_public_code(host):
    figures, method = figures_of("caspl"), built_boosted(host)
    frozen = {name: tensor.clone() for name, tensor in method.boosting.state_dict().items()}
    terms = train_as_public(method, host, HOSTS[host][2], LABELS)
    near(terms["ce"], figures[f"{host}/loss/ce"])
    if host == "promptsrc":
        for name in ("text", "image"):
            near(terms[name], figures[f"promptsrc/loss/{name}_weighted"])
        near(terms["kl"], figures["promptsrc/loss/kl"])
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in method.boosting.state_dict().items())
    lengths = [ids.argmax(1) for ids in (method.prompts.ids, torch.from_numpy(figures[f"{host}/token_ids"]))]
    assert torch.equal(*lengths), "the class names are in the rows of the public code"
