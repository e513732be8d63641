"""The frozen teacher: vanilla CLIP's text features over templates, and larger CLIPs that are kept between runs.

Shapes: C classes, M templates, E joint embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from procap.classifier import unit
from procap.clip import CLIP
from procap.text import LabelSpace
from procap.weights.loading import WeightsKey, load_clip

PROMPTS_AT_ONCE = 512
"""Prompts per pass: 60 templates of 1,000 classes in one batch would not fit a GPU."""


@torch.no_grad()
def text_features(clip: CLIP, texts: Sequence[str]) -> Tensor:
    """Compute text features [P, E] of P texts, not normalised, float32, without gradient.

    Raises UserError for a text that is longer than the context.
    """
    # They are computed once and used in every step, so use full precision regardless of autocast.
    with torch.autocast(clip.device.type, enabled=False):
        return torch.cat([clip.encode_text(part) for part in clip.tokenize(texts).split(PROMPTS_AT_ONCE)]).float()


def text_bank(
    clip: CLIP,
    space: LabelSpace,
    templates: Sequence[str],
    average: Literal["normalise-first", "average-first"] = "normalise-first",
) -> Tensor:
    """Compute text features [C, E] of every class, averaged over `templates`, normalised, float32, without gradient.

    average: "normalise-first" is CLIP's own ensemble (Radford et al. 2021, section 3.1.4): templates count the same.
        "average-first" is what PromptSRC's public code does: long features weigh more.
    """
    total = torch.zeros(len(space.classnames), clip.geometry.embed_dim, device=clip.device)
    # One template at a time: features of 60 templates of ImageNet's 1,000 names would take 123 MB at once.
    for template in templates:
        features = text_features(clip, space.prompts(template))
        total += unit(features) if average == "normalise-first" else features
    return unit(total)


@functools.lru_cache(maxsize=1)
def keep_clip(key: WeightsKey, device: torch.device) -> CLIP:
    """Load the CLIP of a `weights_key`, once for consecutive runs that learn from it; nothing may change it."""
    return load_clip(*key[:2]).to(device)


@functools.lru_cache(maxsize=1)
def keep_text_bank(clip: CLIP, space: LabelSpace) -> Tensor:
    """Compute the text features [C, E] of the template of `space`, once for consecutive runs on one data set."""
    return text_bank(clip, space, [space.template])


def release_teacher() -> None:
    """Free the memory of what `keep_clip` and `keep_text_bank` keep."""
    keep_text_bank.cache_clear()
    keep_clip.cache_clear()


def sentence_bank(clip: CLIP, sentences: Sequence[Sequence[str]]) -> Tensor:
    """Compute text features [P, C, E] of P sentences for each of C classes, normalised, float32, without gradient."""
    features = text_features(clip, [sentence for of_class in sentences for sentence in of_class])
    # [C P, E] to [C, P, E] to [P, C, E], a row of sentences for each draw of a training step.
    return unit(features).unflatten(0, (len(sentences), -1)).transpose(0, 1).contiguous()
