"""PromptKD and CasPL, which learn from a teacher on images without labels, equal their public code."""

from types import SimpleNamespace

import numpy as np
import public_code
import pytest
import torch
from public_code import CLASSNAMES, LABELS, draws, figures_of, images, near, near_condensed, small_clip, take_steps

from procap.errors import UsageError
from procap.methods.public import public_parameters
from procap.text import LabelSpace
from runner.engine import Batch, Engine
from runner.planning import plan_run


def parameters_of(method):
    """The parameters by their public names, without the statistics of the batch norm."""
    return {name: tensor for name, tensor in public_parameters(method).items() if "running" not in name}


def built_promptkd():
    method = public_code.build("promptkd", depth=3, teacher="a run")

    def std(name, shape):
        return 0.2 if name.endswith("1.weight") else shape[1] ** -0.5 if name.endswith("weight") else 0.1

    parameters = parameters_of(method)
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
            gradients = {name: tensor.grad.clone() for name, tensor in parameters_of(method).items()}
    # The batch norm removes the first bias from the loss: its gradient is rounding.
    largest = gradients["VPT_image_trans.conv1.0.weight"]
    for name, gradient in gradients.items():
        near_condensed(gradient, figures[f"grad/{name}"]) if "conv1.0.bias" not in name else None
    assert gradients["VPT_image_trans.conv1.0.bias"].abs().max() < 1e-4 * largest.abs().max()
    for name, tensor in parameters_of(method).items():
        near_condensed(tensor, figures[f"steps/after_3/{name}"])
    near(method.image_adapter[1].running_mean, figures["steps/running_mean"])
    near(method.image_adapter[1].running_var, figures["steps/running_var"])
    for half, name in zip(halves, ("base", "novel"), strict=True):
        near(method.classifier(half)(images()), figures[f"eval_{name}_logits"])
    near(method.classifier()(images()), figures["cross/eval_logits"])


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
