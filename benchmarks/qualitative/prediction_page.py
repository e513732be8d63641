"""Write the predictions of new images as one HTML page of pictures, without external resources."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner.results import write_bytes
from shards.files import read_regular
from shards.images import ImageError, decode
from shards.loose_images import EncodedImage

MAX_PICTURES = 500
"""Pictures of a page; the CSV file has all images."""
SIDE = 160
"""Pixels of the longer side of a picture."""
Answer = tuple[str, float]
"""A class and its probability."""

TEMPLATE = Path(__file__).with_suffix(".html")


def write_page(
    file: Path, title: str, images: Iterable[EncodedImage], answers: Mapping[str, Sequence[Answer]], count: int
) -> None:
    """Write a page of those of `images` that have answers, by name. count: of all images that were classified."""
    from jinja2 import Environment

    pictures = []
    for name, content in images:
        # What cannot be read has no answer, or lies in a file that has changed since.
        with suppress(ImageError, OSError):
            if name in answers:
                data = read_regular(content) if isinstance(content, Path) else content
                picture = decode(data, upright=True, reduced_to=SIDE)
                picture.thumbnail((SIDE, SIDE))
                picture.save(stream := io.BytesIO(), "JPEG", quality=85)
                source = f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
                pictures.append((name, source, answers[name]))
        if len(pictures) == len(answers):
            break
    shown = len(pictures)
    note = f"{count:,} images{f', the first {shown} are shown' if shown < count else ''}"
    template = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    write_bytes(file, template.render(title=title, note=note, pictures=pictures).encode())
