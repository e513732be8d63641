"""ProCAP's losses against direct definitions: loops, torch.distributions, and the edge cases of a batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from procap.losses import info_nce, kl_to_standard_normal, l2


def case(seed, batch, classes, width=6, temperature=0.07):
    g = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(batch, width, generator=g), dim=-1)
    text = F.normalize(torch.randn(classes, width, generator=g), dim=-1)
    labels = torch.randint(classes, (batch,), generator=g)
    return image, text, labels, torch.tensor(math.log(temperature))


def by_hand(image, text, labels, log_temperature):
    """The definition, one sum at a time, in double precision."""
    z, c, tau = image.double(), text.double(), math.exp(log_temperature)
    term = [[math.exp(float(zi @ ck) / tau) for ck in c] for zi in z]
    images, classes = range(len(z)), range(len(c))
    image_to_class = [-math.log(term[i][int(labels[i])] / sum(term[i][k] for k in classes)) for i in images]
    class_to_image = []
    for k in classes:
        own = [i for i in images if int(labels[i]) == k]
        if own:
            class_to_image.append(-math.log(sum(term[i][k] for i in own) / sum(term[i][k] for i in images)))
    return (sum(image_to_class) / len(image_to_class) + sum(class_to_image) / len(class_to_image)) / 2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 9),
    classes=st.integers(1, 12),
    temperature=st.sampled_from([0.07, 0.2, 1.0]),
)
def test_info_nce_is_the_double_loop(seed, batch, classes, temperature):
    image, text, labels, log_temperature = case(seed, batch, classes, temperature=temperature)
    loss = info_nce(image, text, labels, log_temperature)
    assert loss.item() == pytest.approx(by_hand(image, text, labels, log_temperature), rel=2e-5, abs=2e-6)


def test_absent_classes_count_as_negatives_and_only_there():
    """An absent class changes the image-to-class part alone; its own gradient is finite and comes from that part."""
    image, text, labels, log_temperature = case(5, batch=6, classes=3)
    more = torch.cat([text, F.normalize(torch.randn(2, 6, generator=torch.Generator().manual_seed(1)), dim=-1)])
    more.requires_grad_(True)
    change = info_nce(image, more, labels, log_temperature) - info_nce(image, text, labels, log_temperature)
    expected = F.cross_entropy(image @ more.T / 0.07, labels) - F.cross_entropy(image @ text.T / 0.07, labels)
    torch.testing.assert_close(change, expected / 2)
    (got,) = torch.autograd.grad(info_nce(image, more, labels, log_temperature), more)
    (want,) = torch.autograd.grad(F.cross_entropy(image @ more.T / 0.07, labels) / 2, more)
    assert got.isfinite().all()
    torch.testing.assert_close(got[3:], want[3:])


def test_info_nce_gradients_are_those_of_the_definition():
    """Central differences of the loop, for features and temperature, with classes absent from the batch."""
    image, text, labels, log_temperature = (x.double() if x.is_floating_point() else x for x in case(6, 4, 6))
    leaves = [x.float().requires_grad_(True) for x in (image, text, log_temperature)]
    info_nce(leaves[0], leaves[1], labels, leaves[2]).backward()
    step = 1e-5
    for which, leaf in enumerate(leaves):
        for index in range(0, leaf.numel(), 5):
            ends = []
            for sign in (1, -1):
                moved = [image.clone(), text.clone(), log_temperature.clone()]
                moved[which].view(-1)[index] += sign * step
                ends.append(by_hand(moved[0], moved[1], labels, moved[2]))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert leaf.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-3, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), low=st.floats(-12, 0), high=st.floats(0, 2))
def test_kl_is_that_of_torch_distributions(seed, low, high):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(2, 4, 5, generator=g)
    logvar = low + (high - low) * torch.rand(2, 4, 5, generator=g)
    normal = torch.distributions.Normal(mu.double(), torch.exp(logvar.double() / 2))
    expected = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum()
    assert kl_to_standard_normal(mu, logvar).item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)


def test_l2_is_the_sum_of_squared_token_norms():
    mu = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = sum(float(token.norm()) ** 2 for token in mu.flatten(0, 1))
    assert l2(mu).item() == pytest.approx(expected, rel=1e-5)


def test_losses_stay_in_float32_under_autocast():
    image, text, labels, log_temperature = case(8, batch=7, classes=5)
    plain = info_nce(image, text, labels, log_temperature), kl_to_standard_normal(image, image), l2(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = info_nce(image, text, labels, log_temperature), kl_to_standard_normal(image, image), l2(image)
    assert [x.item() for x in cast] == [x.item() for x in plain]
