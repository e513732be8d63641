"""Official lists that come with images as text or MATLAB files: untrusted, and read without building objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shards.raw.folders import UNCHANGED, RawProblem
from shards.raw.places import Place, sheet


def required_list(place: Place, name: str) -> Path:
    """Raises RawProblem that says where the file belongs."""
    file = place.find_list(name)
    if file is None:
        raise RawProblem(f"{place.folder / name} is missing", f"put it there: get {sheet(place.dataset).get}")
    return file


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers. Raises RawProblem when it is no text file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RawProblem(f"{file} cannot be read ({reason})", UNCHANGED) from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.rstrip("\r")


def read_mat(file: Path, name: str) -> Any:
    """One variable of a MATLAB file as a NumPy array. Raises RawProblem when the file or the variable is not there."""
    from scipy.io import loadmat

    try:
        # Structures come as arrays with named fields: nothing of the file chooses a Python class.
        return loadmat(file, variable_names=[name], struct_as_record=True)[name]
    except KeyError as error:
        raise RawProblem(f"{file} holds no '{name}'", UNCHANGED) from error
    except OSError as error:
        raise RawProblem(f"{file} cannot be read ({error.strerror or error})", UNCHANGED) from error
    except Exception as error:
        # A damaged file makes scipy's parser raise whatever its bytes lead to.
        raise RawProblem(f"{file} is not a readable MATLAB file", UNCHANGED) from error
