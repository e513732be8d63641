"""Tables and figures that an earlier options of a suite has left in its folder, where they would pass for current ones.

Files are known by what this program wrote into them; whatever else lies in the folder stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.plots.style import FORMATS, MAKER
from benchmarks.results.pictures import folder_of, pictures_of
from benchmarks.results.suite import SuiteResults
from benchmarks.tables.formats import SUFFIXES
from benchmarks.tables.table import Sheet

HEAD = 1000
"""Bytes of a PNG in which its maker stands."""


def remove_other_sheets(done: SuiteResults, kept: Iterable[Sheet]) -> list[Path]:
    """Remove the files of every other sheet in the suite's folder, and give them."""
    names = {sheet.name for sheet in kept}
    # The JSON goes last: without it nobody would know the others again.
    suffixes = sorted(SUFFIXES.values(), key=lambda suffix: suffix == "json")
    files = sorted(folder_of(done).glob("*.json"))
    return _remove((file for file in files if file.stem not in names and _is_sheet(file)), suffixes)


def remove_other_figures(done: SuiteResults, drawn: Iterable[Path]) -> list[Path]:
    """Remove every other figure in the suite's folder but its recorded pictures, and give the files."""
    names = {file.stem for file in drawn} | set(pictures_of(done).get("pictures", ()))
    suffixes = sorted(FORMATS, key=lambda suffix: suffix == "png")
    files = sorted(folder_of(done).glob("*.png"))
    return _remove((file for file in files if file.stem not in names and _is_figure(file)), suffixes)


def _remove(files: Iterable[Path], suffixes: Iterable[str]) -> list[Path]:
    written = [file.with_name(f"{file.stem}.{suffix}") for file in files for suffix in suffixes]
    there = [file for file in written if file.exists()]
    for file in there:
        file.unlink()
    return there


def _is_sheet(file: Path) -> bool:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("name") == file.stem and {"labels", "columns", "lines"} <= said.keys()


def _is_figure(file: Path) -> bool:
    with file.open("rb") as png:
        return MAKER.encode() in png.read(HEAD)
