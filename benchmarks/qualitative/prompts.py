"""Describe learned text prompts: where they started, how far they moved, and which words are nearest to them.

Shapes: P prompt tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from procap.initialisation import normal
from procap.nearest_words import WORD_RULE, NearWord, Words, first_text_tokens, text_means
from runner.evaluate import TrainedRun
from runner.setup import make_method
from shards.rng import generator

WORDS = 5
RANDOM_STD = 0.02


@dataclass(frozen=True)
class Stage:
    """Tokens [P, D] at one place: as they were at the start, as they are now, and the words nearest to either.

    started: the nearest word to each token at the start; moved: the length of the change over that of the start.
    """

    name: str
    tokens: Tensor
    started: list[NearWord]
    moved: list[float]
    cosine: list[list[NearWord]]
    euclid: list[list[NearWord]]


@dataclass(frozen=True)
class Prompts:
    """A run's text prompts of the first layer: their means, and what the text tower reads where that differs.

    stages is empty for a run without text prompts of its own, or with other ones for every class.
    """

    title: str
    run: TrainedRun
    stages: tuple[Stage, ...]


def read_prompts(title: str, run: TrainedRun) -> Prompts:
    """Read the text prompts of a finished run, compared with those that it started from."""
    start = make_method(run.config, run.clip, run.method.space)
    means, read = text_means(run.method), first_text_tokens(run.method)
    if means is None or read is None:
        return Prompts(title, run, ())
    words = Words.of(run.clip)
    if torch.equal(means, read):
        return Prompts(title, run, (_make_stage("learned tokens", means, text_means(start), words),))
    refined = _make_stage("after cross-attention", read, first_text_tokens(start), words)
    return Prompts(title, run, (_make_stage("learned means", means, text_means(start), words), refined))


def _make_stage(name: str, now: Tensor, start: Tensor | None, words: Words) -> Stage:
    assert start is not None
    now, start = now.cpu().double(), start.cpu().double()
    return Stage(
        name=name,
        tokens=now,
        started=[nearest[0] for nearest in words.nearest(start, 1)],
        moved=((now - start).norm(dim=-1) / start.norm(dim=-1)).tolist(),
        cosine=words.nearest(now, WORDS, "cosine"),
        euclid=words.nearest(now, WORDS, "euclid"),
    )


def draw_random_prompts(learned: Sequence[Prompts]) -> Tensor | None:
    """Draw tokens [P, D] as a method without words to start from does; P is the largest number of those learned.

    None if nothing is learned.
    """
    shapes = [one.stages[0].tokens.shape for one in learned if one.stages]
    if not shapes:
        return None
    shape = (max(count for count, _ in shapes), shapes[0][1])
    return normal(shape, generator(1, "qualitative", "random prompts"), RANDOM_STD).double()


def record_prompts(start: Tensor | None, prompts: Sequence[Prompts]) -> dict[str, Any]:
    """Return everything about the prompts as plain JSON."""
    return {
        "word_rule": WORD_RULE,
        "order": "dimensions in the order of the token embedding, the same in every panel",
        "random": None if start is None else {"std": RANDOM_STD, "tokens": start.tolist()},
        "methods": [
            {
                "title": one.title,
                "method": one.run.config.method,
                "run": one.run.config.path,
                "stages": [_record_stage(stage) for stage in one.stages],
            }
            for one in prompts
        ],
    }


def _record_stage(stage: Stage) -> dict[str, Any]:
    tokens = [
        {
            "values": values.tolist(),
            "started": asdict(started),
            "moved": moved,
            "cosine": [asdict(word) for word in cosine],
            "euclid": [asdict(word) for word in euclid],
        }
        for values, started, moved, cosine, euclid in zip(
            stage.tokens, stage.started, stage.moved, stage.cosine, stage.euclid, strict=True
        )
    ]
    return {"name": stage.name, "tokens": tokens}
