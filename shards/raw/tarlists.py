"""Which tars a folder or a URL with shards holds, split by split, and the text files that lie beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shards.errors import DataError, DataUsageError, NotFound
from shards.remote import download, read_bytes
from shards.urls import cache_name, canonical, join, local_path, redact

SPLITS = {"train": "train", "val": "val", "test": "test"}
COUNT_FILE = "nshards.txt"
# Text files of the convention hold a line per class; more than this is something else.
TEXT_LIMIT = 2**22
MOST_TARS = 100_000
INSIDE = re.compile(r"(?!.*(^|/)\.)[\w.,+=@ -]+(/[\w.,+=@ -]+)*")

# Called with a tar's name, the bytes of it that are here and all its bytes, where the server says how many.
Progress = Callable[[str, int, int | None], None]


def working_folder(location: str, cache: Path) -> Path:
    """Where the tars of a URL lie between their download and `remove_downloads`."""
    return cache / "downloads" / cache_name(location)


@dataclass(frozen=True)
class Place:
    """A folder or a URL with tars in it; names below it have forward slashes."""

    location: str
    cache: Path
    on_progress: Progress | None = None

    @property
    def folder(self) -> Path | None:
        return local_path(self.location)

    def text(self, name: str) -> str | None:
        """A text file of the convention; None when there is none."""
        try:
            return self.read(name)
        except NotFound:
            return None

    def read(self, name: str) -> str:
        """A text file that has to be there. Raises DataError."""
        url = join(canonical(self.location), name)
        try:
            return read_bytes(url, TEXT_LIMIT).decode()
        except UnicodeDecodeError:
            raise DataError(f"{redact(url)} is no short text file in UTF-8") from None

    def here(self, name: str) -> Path:
        """The tar of that name as a local file; downloaded when it is not."""
        if self.folder is not None:
            return self.folder / name
        target = working_folder(self.location, self.cache) / name
        report = self.on_progress
        download(
            join(canonical(self.location), name),
            target,
            on_progress=(lambda done, total: report(name, done, total)) if report else None,
        )
        return target


def listed(place: Place, splits: Mapping[str, str] | None) -> dict[str, list[str]]:
    """The names of the tars of every split, in order."""
    wanted = dict(splits) if splits is not None else SPLITS
    for split, there in wanted.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", split) or not INSIDE.fullmatch(re.sub(r"[{}]", "", there)):
            raise DataUsageError(
                f"split '{split}': '{there}' is no folder or pattern of tars below {redact(place.location)}"
            )
    found = {split: _tars(place, there) for split, there in wanted.items()}
    absent = [there for split, there in wanted.items() if not found[split]]
    if absent and (splits is not None or len(absent) == len(found)):
        where = f"{redact(place.location)} holds no shards of that name"
        if place.folder is not None:
            raise DataError(f"{where}: {' nor '.join(f'{there}/*.tar' for there in absent)} is not there")
        try:
            place.read(f"{absent[0]}/{COUNT_FILE}")
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    return {split: names for split, names in found.items() if names}


def _tars(place: Place, there: str) -> list[str]:
    if there.endswith(".tar"):
        return _expanded(there)
    text = place.text(f"{there}/{COUNT_FILE}")
    if text is not None:
        return _counted(place, there, text)
    return _globbed(place.folder, there) if place.folder is not None else []


def _counted(place: Place, there: str, text: str) -> list[str]:
    digits = text.strip()
    if not re.fullmatch(r"[0-9]{1,6}", digits) or not 0 < int(digits) <= MOST_TARS:
        raise DataError(
            f"{redact(place.location)}: {there}/{COUNT_FILE} says {digits[:40]!r}, not how many tars there are"
        )
    names = [f"{there}/{number}.tar" for number in range(int(digits))]
    if place.folder is not None:
        beside = {f"{there}/{name}" for name in _tar_names(place.folder / there)}
        if beside != set(names):
            example = sorted(beside ^ set(names))[0]
            state = "is not one of them" if example in beside else "is missing"
            raise DataError(f"{place.folder}: {there}/{COUNT_FILE} counts {digits} tars, but {example} {state}")
    return names


def _globbed(folder: Path, there: str) -> list[str]:
    inside = [f"{there}/{name}" for name in _tar_names(folder / there)]
    named = re.compile(rf"(.*[-_.])?{re.escape(there)}([-_.].*)?\.tar")
    names = sorted(inside or filter(named.fullmatch, _tar_names(folder)), key=_natural)
    _refuse_gap(folder, names)
    return names


def _tar_names(folder: Path) -> list[str]:
    # Some systems put a hidden companion beside every file they copy.
    return [file.name for file in folder.glob("*.tar") if not file.name.startswith(".")]


def _refuse_gap(folder: Path, names: Sequence[str]) -> None:
    """A numbered tar that is missing in between was not downloaded: its images must not be left out silently."""
    numbered = [re.fullmatch(r"(.*?)([0-9]+)((?:-of-[0-9]+)?\.tar)", name) for name in names]
    matches = [match for match in numbered if match]
    if len(matches) != len(names) or len({(match[1], match[3]) for match in matches}) != 1:
        return
    for before, after in pairwise(matches):
        if int(after[2]) != int(before[2]) + 1:
            missing = f"{before[1]}{int(before[2]) + 1:0{len(before[2])}}{before[3]}"
            raise DataError(f"{folder / missing} is missing, tars before and after it are there; get it too")


def _expanded(pattern: str) -> list[str]:
    """`x-{000..009}.tar` as ten names; a pattern without a range is one."""
    match = re.fullmatch(r"([^{}]*)\{([0-9]+)\.\.([0-9]+)\}([^{}]*)", pattern)
    if match is None:
        if "{" in pattern or "}" in pattern:
            raise DataUsageError(f"'{pattern}' is no name of tars: it may hold one range, such as {{000..009}}")
        return [pattern]
    first, last = int(match[2]), int(match[3])
    if not first <= last < first + MOST_TARS:
        raise DataUsageError(f"'{pattern}' names {'no' if last < first else f'more than {MOST_TARS:,}'} tars")
    return [f"{match[1]}{number:0{len(match[2])}}{match[4]}" for number in range(first, last + 1)]


def _natural(name: str) -> list[tuple[int, str]]:
    # Every other part is a number; text between can be digits too, of another script.
    return [(int(part), "") if odd % 2 else (-1, part) for odd, part in enumerate(re.split(r"([0-9]+)", name))]


def classnames_of(place: Place) -> tuple[str, ...]:
    text = place.text("classnames.txt")
    names = tuple(line.strip() for line in (text or "").splitlines())
    if not names or not all(names):
        raise DataUsageError(
            f"{redact(place.location)} has no classnames.txt with a name per class: give the class names"
        )
    return names
