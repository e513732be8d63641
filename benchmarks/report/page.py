"""Render a report as one HTML page without external resources, and write its tables and pictures as files."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import DPI, FORMATS, draw_styled, image_of
from benchmarks.results.metrics import describe_seeds
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.render import SUFFIXES, mark_code, render, to_html
from benchmarks.tables.table import Table, list_notes
from procap.errors import UserError
from runner.results import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("page.html")
GENERATOR = "procap report"
FOLDED_FROM = 36
"""Rows from which a table is folded."""
MAX_ROWS = 250
"""Rows of a table in the page; its files have all."""
PIXELS = 125
"""CSS pixels per printed inch of a picture: 1.3 times its size in print."""


@dataclass(frozen=True)
class Picture:
    """A picture and its files, by suffix, of which the page shows SVG or PNG. alt: a description. width: in inches."""

    name: str
    caption: str
    alt: str
    files: Mapping[str, bytes]
    width: float


def draw_picture(name: str, draw: Callable[[], Figure | None]) -> Picture | None:
    """Draw a plot, described by its title; None if it has nothing to show."""
    figure = draw_styled(draw)
    if figure is None:
        return None
    files = {form: image_of(figure, form) for form in ("svg", "pdf", "png")}
    # Formulas have dollar signs, and long texts line breaks.
    caption = " ".join((figure.get_suptitle() or name).replace("$", "").split())
    return Picture(name, caption, caption, files, figure.get_figwidth())


def load_picture(results: SuiteResults, name: str) -> Picture:
    """Load a recorded picture of a suite, such as attention maps."""
    from PIL import Image

    texts = results.pictures["pictures"][name]
    paths = {form: results.folder / f"{name}.{form}" for form in FORMATS}
    files = {
        form: _read_inside(results.results, path) for form, path in paths.items() if form == "png" or path.exists()
    }
    with Image.open(io.BytesIO(files["png"])) as image:
        return Picture(name, texts["caption"], texts["alt"], files, image.width / DPI)


def _read_inside(folder: Path, file: Path) -> bytes:
    """Read a regular file inside `folder`. Raises UserError for anything else, such as a link to another file."""
    if file.is_symlink() or not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{file} is no regular file inside the results")
    return file.read_bytes()


class PageFiles:
    """Collect files with unique names, and number tables and pictures in the order of calls."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.names: set[str] = set()
        self.table_numbers, self.picture_numbers = itertools.count(1), itertools.count(1)
        self.further_numbers = itertools.count(2)

    def _make_name(self, title: str) -> str:
        """Return `title` as an id and file name, unique in the page."""
        # File systems take 255 letters, and a path of an image can have more.
        name = plain = re.sub(r"[^A-Za-z0-9]+", "-", title)[-100:].strip("-").lower() or "part"
        while name in self.names:
            name = f"{plain}-{next(self.further_numbers)}"
        self.names.add(name)
        return name

    def table(self, table: Table) -> dict[str, Any]:
        """Add the files of a table; returns what the template shows."""
        name = self._make_name(table.name)
        for form, suffix in SUFFIXES.items():
            self.contents[f"tables/{name}.{suffix}"] = f"{render(replace(table, name=name), form)}\n".encode()
        rows = len(table.rows)
        if rows > MAX_ROWS:
            note = f"The first {MAX_ROWS} of {rows:,} rows; the files have all."
            table = replace(table, rows=table.rows[:MAX_ROWS], notes=(note, *table.notes))
        seeds = describe_seeds(table.metrics, std=False)
        return {
            "id": f"table-{name}",
            "title": f"Table {next(self.table_numbers)}. {table.title}",
            "seeds": seeds and f", {seeds}",
            "html": to_html(table, f"table-{name}-title"),
            "notes": list_notes(table),
            "rows": rows,
            "wide": table.is_wide,
            "long": rows >= FOLDED_FROM,
            "latex": render(table, "latex"),
            "files": [(form, f"tables/{name}.{form}") for form in SUFFIXES.values()],
        }

    def picture(self, picture: Picture) -> dict[str, Any]:
        """Add the files of a picture; returns what the template shows."""
        name = self._make_name(picture.name)
        self.contents |= {f"figures/{name}.{form}": content for form, content in picture.files.items()}
        form, media_type = ("svg", "image/svg+xml") if "svg" in picture.files else ("png", "image/png")
        return {
            "id": f"figure-{name}",
            "caption": f"Figure {next(self.picture_numbers)}. {picture.caption}",
            "alt": picture.alt,
            "width": round(picture.width * PIXELS),
            "source": _to_url(picture.files[form], media_type),
            "files": [(form, f"figures/{name}.{form}") for form in sorted(picture.files)],
        }

    def photo(self, path: str, content: bytes) -> str:
        """Add the file of an image; returns where it lies."""
        file = f"figures/{self._make_name(path)}.jpg"
        self.contents[file] = content
        return file


def write_page(contents: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write what `build_report` returns to index.html, `tables` and `figures` in `folder`; returns the files."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    # All texts are escaped, as names in results can come from outside; a wrong name in the template is an error.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"digest": _digest, "url": _to_url, "mark_code": lambda text: Markup(mark_code(text))}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    files = PageFiles()
    # The template calls the methods of `files`, which collect files and number tables and pictures as they appear.
    page = template.render(contents, files=files, generator=GENERATOR)
    # No line break between a number and its sign.
    page = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", page)
    # The page is last, so that its links lead somewhere.
    written = {folder / name: content for name, content in {**files.contents, "index.html": page.encode()}.items()}
    for file, content in written.items():
        write_bytes(file, content)
    return [*written]


def _to_url(content: bytes, media_type: str = "image/jpeg") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _digest(script: str) -> str:
    """Return the hash by which the page's Content-Security-Policy allows its one script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
