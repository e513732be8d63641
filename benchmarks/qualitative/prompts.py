"""Learned text prompts as numbers: where they started, how far they went, and which words are nearest to them.

Shapes: P prompt tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from procap.initialisation import normal
from procap.nearest_words import WORD_RULE, Near, Words, first_text_tokens, text_means
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
    started: tuple[Near, ...]
    moved: tuple[float, ...]
    cosine: tuple[tuple[Near, ...], ...]
    euclid: tuple[tuple[Near, ...], ...]


@dataclass(frozen=True)
class LearnedPrompts:
    """A run's text prompts of the first layer: their means, and what the text tower reads where that differs."""

    title: str
    run: TrainedRun
    stages: tuple[Stage, ...]

    @property
    def means(self) -> Stage:
        return self.stages[0]


@dataclass(frozen=True)
class NoPrompts:
    """A run without text prompts of its own, or with other ones for every class."""

    title: str
    run: TrainedRun


def learned_prompts(title: str, run: TrainedRun) -> LearnedPrompts | NoPrompts:
    """The text prompts of a finished run, compared with those that it started from."""
    start = make_method(run.config, run.clip, run.method.space)
    means, read = text_means(run.method), first_text_tokens(run.method)
    if means is None or read is None:
        return NoPrompts(title, run)
    words = Words.of(run.clip)
    refined = not torch.equal(means, read)
    stages = [_stage("learned means" if refined else "learned tokens", means, text_means(start), words)]
    if refined:
        stages.append(_stage("after cross-attention", read, first_text_tokens(start), words))
    return LearnedPrompts(title, run, tuple(stages))


def _stage(name: str, now: Tensor, start: Tensor | None, words: Words) -> Stage:
    assert start is not None
    now, start = now.cpu().double(), start.cpu().double()
    return Stage(
        name=name,
        tokens=now,
        started=tuple(nearest[0] for nearest in words.nearest(start, 1)),
        moved=tuple(((now - start).norm(dim=-1) / start.norm(dim=-1)).tolist()),
        cosine=tuple(map(tuple, words.nearest(now, WORDS, "cosine"))),
        euclid=tuple(map(tuple, words.nearest(now, WORDS, "euclid"))),
    )


def random_prompts(learned: Sequence[LearnedPrompts]) -> Tensor | None:
    """Tokens [P, D] as a method without words to start from draws them; P is the largest number of those learned.

    None where nothing is learned.
    """
    if not learned:
        return None
    shape = (max(len(one.means.tokens) for one in learned), learned[0].means.tokens.shape[1])
    return normal(shape, generator(1, "qualitative", "random prompts"), RANDOM_STD).double()


def prompts_record(start: Tensor | None, shown: Iterable[LearnedPrompts | NoPrompts]) -> Mapping[str, Any]:
    """Everything about the prompts as plain JSON."""
    return {
        "word_rule": WORD_RULE,
        "order": "dimensions in the order of the token embedding, the same in every panel",
        "random": None if start is None else {"std": RANDOM_STD, "tokens": start.tolist()},
        "methods": [
            {
                "title": one.title,
                "method": one.run.config.method,
                "run": one.run.config.path,
                "stages": [_stage_record(stage) for stage in one.stages] if isinstance(one, LearnedPrompts) else [],
            }
            for one in shown
        ],
    }


def _stage_record(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "tokens": [
            {
                "values": stage.tokens[token].tolist(),
                "started": _near(stage.started[token]),
                "moved": stage.moved[token],
                "cosine": [_near(near) for near in stage.cosine[token]],
                "euclid": [_near(near) for near in stage.euclid[token]],
            }
            for token in range(len(stage.tokens))
        ],
    }


def _near(near: Near) -> dict[str, Any]:
    return {"word": near.word, "token": near.token, "value": near.value}
