"""The steps and classifiers of all methods keep to the device cuda:0 and never make the host wait for it."""

import contextlib

import pytest
import torch
from cuda_tensors import DEVICE, CudaDevice, CudaTensor
from small_runs import mark_slow, pictures, seeded
from tiny_geometry import SHORT_GEOMETRY, SHORT_OPTIONS

from procap.classifier import OnlineClassifier
from procap.clip import CLIP
from procap.methods import METHODS, build_method, method_class
from procap.methods.features import FeatureBank, FeatureMethod

OPTIONS = {"coprompt": {"sentences": "templates"}}
LABELS = torch.tensor([0, 3, 1, 4, 2])


@pytest.fixture(scope="module")
def clip():
    return CLIP.random(SHORT_GEOMETRY, seed=0, name="tiny")


class Pool:
    """Training images."""

    labels = LABELS

    def image(self, i, generator):
        return pictures(5)[i]


@pytest.mark.parametrize("name", mark_slow(METHODS))
def test_step_and_classifier_keep_to_the_device(name, clip, tiny_space, short_checkpoint, monkeypatch):
    # Tensor subclasses support neither inference mode nor cuDNN.
    monkeypatch.setattr(torch, "inference_mode", lambda on=True: torch.no_grad() if on else contextlib.nullcontext())
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    options = {**SHORT_OPTIONS.get(name, {}), **OPTIONS.get(name, {})}
    if method_class(name).required_option == "teacher":
        options["teacher"] = str(short_checkpoint)
    views = method_class(name).views
    with CudaDevice() as device:
        on_cuda = clip.to(DEVICE)
        method = build_method(name, on_cuda, tiny_space, options, seeded())
        method.training_images = Pool()
        method.prepare_training()
        images, labels = pictures(5).to(DEVICE), LABELS.to(DEVICE)
        if isinstance(method, FeatureMethod):
            with torch.no_grad():
                features = on_cuda.encode_image(images, method.image_plan())
            # Two views that differ, as crops do.
            crops = torch.stack([features, features.roll(1, dims=1)], dim=1)
            method.fit(FeatureBank(crops, labels, features, labels))
            batch = features
        else:
            batch = images[:, None].expand(-1, views, -1, -1, -1) if views > 1 else images
        method.begin_stage(0)
        batch, labels = (tensor.to(DEVICE) for tensor in method.extend_batch(batch, labels, seeded()))
        noise = tuple(tensor.to(DEVICE) for tensor in method.draw(seeded()))
        if any(parameter.requires_grad for parameter in method.parameters()):
            # The first step lays the prompts out.
            method.loss(batch, labels, noise)
            with device.step():
                terms = method.loss(batch, labels, noise)
            assert all(isinstance(term, CudaTensor) for term in terms.values())
        with torch.no_grad():
            classifier = method.classifier()
            # Logits of an online classifier are computed once, not in a step. TPT's need gradients, which are not here.
            is_plain = classifier.views == 1 and not isinstance(classifier, OnlineClassifier)
            classify = classifier if is_plain else classifier.encode
            classify(images)
            with device.step():
                assert classify(images).device == DEVICE
