"""The teacher is frozen CLIP: text banks average templates by the policy asked for."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from procap.teacher import text_bank

TEMPLATES = ("a photo of a {}.", "a blurry drawing of many {} in the snow", "{}")


def test_one_template_is_zero_shot_clip_under_either_policy(tiny_clip, tiny_space):
    prompts = [f"a photo of a {name}." for name in tiny_space.names()]
    expected = normalize(tiny_clip.encode_text(tiny_clip.tokenize(prompts)), dim=-1)
    for average in ("normalise-first", "average-first"):
        bank = text_bank(tiny_clip, tiny_space, TEMPLATES[:1], average)
        torch.testing.assert_close(bank, expected, atol=3e-6, rtol=0)


def test_policies_average_what_they_say_and_differ(tiny_clip, tiny_space):
    each = torch.stack(
        [
            tiny_clip.encode_text(tiny_clip.tokenize([template.format(name) for name in tiny_space.names()]))
            for template in TEMPLATES
        ]
    )
    first = text_bank(tiny_clip, tiny_space, TEMPLATES, "normalise-first")
    later = text_bank(tiny_clip, tiny_space, TEMPLATES, "average-first")
    torch.testing.assert_close(first, normalize(normalize(each, dim=-1).mean(0), dim=-1), atol=3e-6, rtol=0)
    torch.testing.assert_close(later, normalize(each.mean(0), dim=-1), atol=3e-6, rtol=0)
    assert (first - later).abs().max() > 1e-4


def test_banks_ignore_autocast_and_carry_no_gradient(tiny_clip, tiny_space):
    exact = text_bank(tiny_clip, tiny_space, TEMPLATES)
    with torch.autocast("cpu", torch.bfloat16):
        inside = text_bank(tiny_clip, tiny_space, TEMPLATES)
    assert torch.equal(exact, inside) and not exact.requires_grad
