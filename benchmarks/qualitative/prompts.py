"""Describe learned text prompts: where they started, how far they moved, and which words are nearest to them.

Shapes: P prompt tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.qualitative.nearest_words import WORD_RULE, Words, first_text_tokens, text_means
from procap.initialisation import normal
from runner.evaluate import TrainedRun
from runner.setup import make_method
from shards.rng import generator

WORDS = 5
RANDOM_STD = 0.02


def read_prompts(title: str, run: TrainedRun) -> dict[str, Any]:
    """Describe a finished run's text prompts of the first layer, compared with those that it started from.

    stages: the means, and what the text tower reads if that differs; none without prompts common to all classes.
    """
    start = make_method(run.config, run.clip, run.method.space)
    means, read = text_means(run.method), first_text_tokens(run.method)
    stages = []
    if means is not None and read is not None:
        words = Words.of(run.clip)
        if torch.equal(means, read):
            stages.append(_describe_stage("learned tokens", means, text_means(start), words))
        else:
            stages.append(_describe_stage("learned means", means, text_means(start), words))
            stages.append(_describe_stage("after cross-attention", read, first_text_tokens(start), words))
    return {"title": title, "method": run.config.method, "run": run.config.path, "stages": stages}


def _describe_stage(name: str, now: Tensor, start: Tensor | None, words: Words) -> dict[str, Any]:
    """Describe tokens [P, D] at one place: values, the nearest words at the start and now, and how far they moved."""
    assert start is not None
    now, start = now.cpu().double(), start.cpu().double()
    moved = ((now - start).norm(dim=-1) / start.norm(dim=-1)).tolist()
    started, nearest = words.nearest(start, 1), words.nearest(now, WORDS)
    tokens = [
        {
            "values": values,
            "started": asdict(started[index][0]),
            "moved": moved[index],
            "cosine": [asdict(word) for word in nearest[index]],
        }
        for index, values in enumerate(now.tolist())
    ]
    return {"name": name, "tokens": tokens}


def record_prompts(methods: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collect descriptions of `read_prompts`, and random tokens as a method without words to start from draws them."""
    learned = [method["stages"][0]["tokens"] for method in methods if method["stages"]]
    random = None
    if learned:
        shape = (max(map(len, learned)), len(learned[0][0]["values"]))
        tokens = normal(shape, generator(1, "qualitative", "random prompts"), RANDOM_STD).double()
        random = {"std": RANDOM_STD, "tokens": tokens.tolist()}
    return {
        "word_rule": WORD_RULE,
        "order": "dimensions in the order of the token embedding, the same in every panel",
        "random": random,
        "methods": list(methods),
    }
