"""Describe learned text prompts: where they started, how far they moved, and which words are nearest to them.

Source: Zhou et al. 2022 (CoOp), section 4.2, "Interpreting the learned prompts", with cosines instead of distances:
learned tokens differ in length, and CLIP normalises its rows.

Shapes: V token ids, W words, P learned tokens, D text width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from procap.clip import CLIP
from procap.initialisation import normal
from procap.methods.method import Method
from procap.plan import INPUT
from procap.tokenizer import simple_tokenizer
from runner.session import TrainedRun
from runner.setup import build_initial_method
from shards.rng import generator

WORD_RULE = (
    "a word is a token of small letters (or letters without case) that ends a word; left out are fragments that words "
    "only begin with, punctuation, digits, control tokens, and tokens whose embedding is also that of another token"
)


class Words(NamedTuple):
    """The words of a model: token ids [W], their text, and their embeddings [W, D] in float64 on the CPU."""

    ids: Tensor
    texts: tuple[str, ...]
    embeddings: Tensor

    @classmethod
    def of(cls, clip: CLIP) -> Words:
        """Collect the words of `clip` that `WORD_RULE` keeps."""
        table = clip.text.token_embedding.weight.detach().cpu().float()
        # As bytes, because rows of a tensor cannot be counted.
        rows = [row.tobytes() for row in table.numpy()]
        uses = Counter(rows)
        # A model may have fewer embeddings than the tokenizer has tokens.
        chosen = {token: text for token, text in vocabulary().items() if token < len(rows) and uses[rows[token]] == 1}
        ids = torch.tensor(list(chosen), dtype=torch.long)
        return cls(ids, tuple(chosen.values()), table[ids].double())

    def nearest(self, tokens: Tensor, count: int = 5) -> list[list[dict[str, Any]]]:
        """Find word, token id and cosine of the `count` words nearest to each of `tokens` [P, D], nearest first."""
        values = F.normalize(tokens.detach().cpu().double(), dim=-1) @ F.normalize(self.embeddings, dim=-1).T
        best, order = (column[:, :count].tolist() for column in values.sort(dim=-1, descending=True, stable=True))
        return [
            [{"word": self.texts[i], "token": int(self.ids[i]), "value": value} for i, value in zip(*pair, strict=True)]
            for pair in zip(order, best, strict=True)
        ]


@lru_cache(maxsize=1)
def vocabulary() -> dict[int, str]:
    """List token id and text of the words of CLIP's vocabulary, by the parts of `WORD_RULE` that need no weights."""
    tokenizer = simple_tokenizer()
    words = {}
    for token in sorted(tokenizer.decoder):
        # The end of a word is decoded to a blank.
        text = tokenizer.decode([token])
        # The tokenizer lowers the case of prompts, so words of its table with capital letters never occur in one.
        if text.endswith(" ") and text[:-1].isalpha() and text == text.lower():
            words[int(token)] = text[:-1]
    return words


def first_text_tokens(method: Method) -> Tensor | None:
    """Return the learned tokens [P, D] in the input of the text tower, before positions are added.

    For ProCAP these are the means after the first level of cross-attention. None if nothing is learned there, if every
    class has its own tokens, or if several operations act on the input.
    """
    with torch.no_grad():
        _, plan = method.plans(method.prompts)
    first = [op.tokens for op in plan.tokens if op.layer == INPUT]
    return first[0].detach() if len(first) == 1 and first[0].dim() == 2 else None


def text_means(method: Method) -> Tensor | None:
    """Return the means [P, D] of a method's Gaussian text tokens before refinement; else `first_text_tokens`.

    A method holds such means as `text_mu` [S, P, D], the first set first.
    """
    means = getattr(method, "text_mu", None)
    return means[0].detach() if isinstance(means, Tensor) and means.dim() == 3 else first_text_tokens(method)


def read_prompts(title: str, run: TrainedRun) -> dict[str, Any]:
    """Describe a finished run's text prompts of the first layer, compared with those that it started from.

    stages: the means, and what the text tower reads if that differs; none without prompts common to all classes.
    """
    # Initialisation is seeded by the configuration, so the start of the training can be made again.
    start = build_initial_method(run.config, run.clip, run.method.space)
    means, read = text_means(run.method), first_text_tokens(run.method)
    stages = {}
    if means is not None and read is not None:
        stages = {
            "learned means": (means, text_means(start)),
            "after cross-attention": (read, first_text_tokens(start)),
        }
        # Nothing refines the means: one stage instead of two equal ones.
        if torch.equal(means, read):
            stages = {"learned tokens": (means, text_means(start))}
    words = Words.of(run.clip)
    described = [{"name": name, "tokens": _describe_tokens(*tokens, words)} for name, tokens in stages.items()]
    return {"title": title, "method": run.config.method, "run": run.config.path, "stages": described}


def _describe_tokens(now: Tensor, start: Tensor | None, words: Words) -> list[dict[str, Any]]:
    """Describe tokens [P, D]: values, the nearest words at the start and now, and how far they moved."""
    assert start is not None
    now, start = now.cpu().double(), start.cpu().double()
    moved = (now - start).norm(dim=-1) / start.norm(dim=-1)
    columns = now.tolist(), words.nearest(start, 1), moved.tolist(), words.nearest(now)
    return [
        {"values": values, "started": started, "moved": distance, "cosine": nearest}
        for values, [started], distance, nearest in zip(*columns, strict=True)
    ]


def record_prompts(methods: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collect descriptions of `read_prompts`, and random tokens as a method without words to start from draws them."""
    learned = [method["stages"][0]["tokens"] for method in methods if method["stages"]]
    random = None
    if learned:
        shape = (max(map(len, learned)), len(learned[0][0]["values"]))
        random = normal(shape, generator(1, "qualitative", "random prompts"), 0.02).double().tolist()
    return {"word_rule": WORD_RULE, "random": random, "methods": list(methods)}
