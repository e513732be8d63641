"""Write the predictions of new images as one HTML page of pictures, without external resources."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from runner.results import write_bytes
from shards.files import read_regular
from shards.image_files import EncodedImage
from shards.images import ImageError, decode

MAX_PICTURES = 500
"""Pictures of a page; the CSV file has all images."""
SIDE = 160
"""Pixels of the longer side of a picture."""

TEMPLATE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 14px/1.35 system-ui, sans-serif; margin: 1.5rem; color: #1f2430; background: #fff }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 1rem }
figure { margin: 0 } img { display: block; height: 160px; max-width: 100%; object-fit: contain; object-position: left }
figcaption { overflow-wrap: anywhere } small { color: #6b7280 } meter { width: 4rem }
</style>
<h1>{{ title }}</h1>
<p>{{ note }}</p>
<main>
{% for name, source, answers in pictures %}
<figure><img src="{{ source }}" alt=""><figcaption>
{% for label, probability in answers %}
<div><meter value="{{ probability }}"></meter> {{ "<b>"|safe if loop.first }}{{ label }}{{ "</b>"|safe if loop.first }} {{ "%.1f"|format(100 * probability) }}&nbsp;%</div>
{% endfor %}
<small>{{ name }}</small></figcaption></figure>
{% endfor %}
</main></html>
"""  # noqa: E501


class PredictionPage:
    """Collects small JPEGs of images and what they were taken for, by the images' names, while both pass through."""

    def __init__(self) -> None:
        self._jpegs: dict[str, bytes] = {}
        self._answers: dict[str, list[tuple[str, float]]] = {}

    def watch_images(self, images: Iterator[EncodedImage]) -> Iterator[EncodedImage]:
        """Yield `images` as they are; those that cannot be decoded have no picture."""
        for name, content in images:
            # What cannot be read is reported by what decodes the whole image.
            with suppress(ImageError, OSError):
                if len(self._jpegs) < MAX_PICTURES:
                    data = read_regular(content) if isinstance(content, Path) else content
                    picture = decode(data, upright=True, reduced_to=SIDE)
                    picture.thumbnail((SIDE, SIDE))
                    picture.save(stream := io.BytesIO(), "JPEG", quality=85)
                    self._jpegs[name] = stream.getvalue()
            yield name, content

    def watch_predictions(
        self, predictions: Iterator[tuple[str, Tensor]], classnames: Sequence[str], top: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield `predictions` (name, probabilities [C]) as they are, and keep the `top` likeliest classes."""
        for name, probabilities in predictions:
            values, labels = (each.tolist() for each in probabilities.topk(top))
            self._answers[name] = [(classnames[label], value) for value, label in zip(values, labels, strict=True)]
            yield name, probabilities

    def write(self, file: Path, title: str) -> None:
        from jinja2 import Environment

        pictures = [
            (name, f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}", self._answers[name])
            for name, jpeg in self._jpegs.items()
            if name in self._answers
        ]
        count, shown = len(self._answers), len(pictures)
        note = f"{count:,} images{f', the first {shown} are shown' if shown < count else ''}"
        template = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE)
        write_bytes(file, template.render(title=title, note=note, pictures=pictures).encode())
