"""Prompt tokens: their initial values, the text around them, and their rows in the towers.

Shapes: C classes, P prompt tokens, T token ids per prompt, K prompted layers, D width (Dt text, Dv vision).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.initialisation import normal
from procap.plan import INPUT, Plan, TokenOp
from procap.prompt_packing import PromptSet
from procap.text import LabelSpace

PLACEHOLDER = "X"
"""A word of exactly one token, which reserves the row of a learned token."""


@dataclass(frozen=True)
class ClassPrompts:
    """One tokenized prompt per class, ids [C, T].

    reference: frozen features [C, E] of the classes, for methods whose prompts are made from them.
    """

    ids: Tensor
    reference: Tensor | None = None

    @cached_property
    def tokenized(self) -> PromptSet:
        """The prompts for the text tower, which lays them out at the first use."""
        return PromptSet(self.ids)


def tokenize_classes(clip: CLIP, names: Sequence[str], texts: Sequence[str]) -> Tensor:
    """Tokenize `texts` to ids [C, T]; UserError names the class whose prompt is too long."""
    ids = []
    for name, text in zip(names, texts, strict=True):
        try:
            ids.append(clip.tokenize([text]))
        except UserError as error:
            raise UserError(f"class '{name}': {error}") from error
    return torch.cat(ids)


def template_prompts(clip: CLIP, space: LabelSpace, template: str | None = None) -> ClassPrompts:
    """Tokenize one template filled with each class name; None: that of the data set."""
    return ClassPrompts(tokenize_classes(clip, space.names(), space.prompts(template)))


def context_prompts(clip: CLIP, space: LabelSpace, n_ctx: int, words: str = "{}.") -> ClassPrompts:
    """Tokenize "[SOS] context <words with the class name> [EOS]"; the context is `n_ctx` placeholders of one token."""
    return template_prompts(clip, space, f"{' '.join([PLACEHOLDER] * n_ctx)} {words}")


def phrase_prompts(clip: CLIP, space: LabelSpace, phrase: str, n_ctx: int) -> ClassPrompts:
    """Tokenize MaPLe's "[SOS] phrase <class name> . [EOS]", whose first n_ctx tokens learned ones replace."""
    return template_prompts(clip, space, f"{phrase_prefix(phrase, n_ctx)} {{}}.")


def words_of(phrase: str) -> list[str]:
    """Split a phrase into words; underscores count as spaces."""
    return phrase.replace("_", " ").split()


def deep_plans(clip: CLIP, vision: Sequence[Tensor], text: Sequence[Tensor]) -> tuple[Plan, Plan]:
    """Build image and text plan for K layers of prompts, tokens [P, Dv] and [P, Dt] per layer, in MaPLe's rows.

    Vision tokens follow the patches; they are added after the positional embedding and before `ln_pre`. Text tokens
    follow the start token and are added before the positional embedding. Blocks 1..K-1 replace the same rows by tokens
    of their own; from block K on the rows are not replaced any more.
    """
    behind = clip.visual.num_tokens
    # Layer 0 is the input, whose tokens get positions (text) or `ln_pre` (vision); those of blocks enter as they are.
    image_plan = [
        TokenOp(layer, "replace", tokens, start=behind) if layer else TokenOp(INPUT, "append", tokens)
        for layer, tokens in enumerate(vision)
    ]
    text_plan = [TokenOp(layer or INPUT, "replace", tokens, start=1) for layer, tokens in enumerate(text)]
    return Plan(tuple(image_plan)), Plan(tuple(text_plan))


def context_plan(tokens: Tensor) -> Plan:
    """Put learned tokens behind the start token: [P, Dt], or token sets [S, 1, P, Dt] (`TokenOp`)."""
    return Plan((TokenOp(INPUT, "replace", tokens, start=1),))


def check_blocks(clip: CLIP, most: int, **options: int) -> None:
    """Raise UsageError if one of `options` counts or names more blocks than the towers of `clip` have for it."""
    g = clip.geometry
    for name, value in options.items():
        if value > most:
            raise UsageError(
                f"{name} = {value}, but {clip.name} has {g.vision_layers} vision and {g.text_layers} text blocks: "
                f"give at most {most}"
            )


def phrase_tokens(clip: CLIP, phrase: str) -> Tensor:
    """Embed the tokens of `phrase` as [P, Dt]; an empty phrase has none."""
    ids = clip.tokenize([phrase])[0]
    # The end token has the largest id; the start token is the first.
    return clip.token_embedding(ids[1 : int(ids.argmax())]).detach().clone()


PHRASE_LIMIT = 4
"""With more context tokens than this the public code of MaPLe and its kin ignores the phrase and starts at random."""


def phrase_prefix(phrase: str, n_ctx: int) -> str:
    """Return the words before every class name of MaPLe's prompts; learned tokens replace their first n_ctx tokens."""
    words = words_of(phrase) if n_ctx <= PHRASE_LIMIT else []
    return " ".join(words or [PLACEHOLDER] * n_ctx)


def phrase_context(clip: CLIP, phrase: str, n_ctx: int, generator: torch.Generator) -> Tensor:
    """Return MaPLe's initial context [P, Dt]: the first tokens of `phrase`, or N(0, 0.02^2) if it is not used.

    Raises UsageError for a phrase of fewer than n_ctx tokens.
    """
    if not words_of(phrase) or n_ctx > PHRASE_LIMIT:
        return normal((n_ctx, clip.geometry.text_width), generator)
    tokens = phrase_tokens(clip, phrase_prefix(phrase, n_ctx))
    if len(tokens) < n_ctx:
        raise UsageError(
            f"ctx_init '{phrase}' has {len(tokens)} tokens, fewer than n_ctx = {n_ctx}: "
            "give a longer phrase, or an empty one for a random start"
        )
    return tokens[:n_ctx].clone()
