"""Caption and description of the qualitative pictures, for those who read of them and those who do not see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Words = dict[str, str]
"""caption, and alt: what the picture shows."""


def picture_words(record: Mapping[str, Any]) -> dict[str, Words]:
    """Of every picture that the record has something of."""
    return (_compared(record) if "picks" in record else {}) | {"prompts": _prompts(record["prompts"])}


def _compared(record: Mapping[str, Any]) -> dict[str, Words]:
    target, maps = record["target"].partition(":")[0], record["eigencam"]
    titles = ", ".join(method["title"] for method in record["methods"])
    answers = [
        f"{pick['class']}: "
        + ", ".join(
            f"{title} right" if pick["right"][title] else f"{title} says {answer}"
            for title, answer in pick["answers"].items()
        )
        for pick in record["picks"]
    ]
    return {
        "predictions": {
            "caption": f"Predictions on {target}. Chosen: {record['pick_rule']}.",
            "alt": f"Test images with the true class and the answers of {titles}. {'. '.join(answers)}",
        },
        "eigencam": {
            "caption": f"EigenCAM of the same images: first principal component of {maps['tokens']}; {maps['sign']}; "
            f"{maps['range']}.",
            "alt": f"The same test images, each beside a map of where {titles} look, laid over it",
        },
    }


def _prompts(prompts: Mapping[str, Any]) -> Words:
    titles = ", ".join(method["title"] for method in prompts["methods"])
    return {
        "caption": f"Learned text prompts of the first layer beside random ones; {prompts['order']}.",
        "alt": "Heat maps of text prompts, a row per token and a column per dimension, at random, before and after "
        f"training: {titles}",
    }
