"""Read shards that others published, in clip-benchmark's layout or as named tars, as a source for packing.

A split is a folder with `nshards.txt` and `0.tar`, `1.tar`, ..., or with any tars, or the tars `<name>-<split>-000.tar`
of the folder itself. What lies behind a URL is downloaded to a working folder first, which `remove_downloads` empties.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from shards.dataset import Dataset
from shards.errors import DataError, DataUsageError, NotFound
from shards.published import PUBLISHED
from shards.records import Record, Source
from shards.remote import download, read_bytes
from shards.tar import TarIndex, TarProblem, scan_tar
from shards.urls import cache_name, canonical, is_url, join, local_path, redact

SPLITS = {"train": "train", "val": "val", "test": "test"}
COUNT_FILE = "nshards.txt"
# Largest text file of the convention, in bytes; such a file holds one line per class.
TEXT_LIMIT = 2**22
MOST_TARS = 100_000
INSIDE = re.compile(r"(?!.*(^|/)\.)[\w.,+=@ -]+(/[\w.,+=@ -]+)*")

# Called with a tar's name, its bytes downloaded so far, and all its bytes if the server gives their number.
Progress = Callable[[str, int, int | None], None]


def working_folder(location: str, cache: Path) -> Path:
    """Return the folder of a URL's tars between their download and `remove_downloads`."""
    return cache / "downloads" / cache_name(location)


@dataclass(frozen=True)
class TarRoot:
    """A folder or a URL with tars in it; names below it have forward slashes."""

    location: str
    cache: Path
    on_progress: Progress | None = None

    @property
    def folder(self) -> Path | None:
        return local_path(self.location)

    def find_text(self, name: str) -> str | None:
        """Read a text file of the convention; None if there is none."""
        try:
            return self.read(name)
        except NotFound:
            return None

    def read(self, name: str) -> str:
        """Read a text file that must exist. Raises DataError."""
        url = join(canonical(self.location), name)
        try:
            return read_bytes(url, TEXT_LIMIT).decode()
        except UnicodeDecodeError:
            raise DataError(f"{redact(url)} is no short text file in UTF-8") from None

    def local_file(self, name: str) -> Path:
        """Return the tar of that name as a local file; a remote one is downloaded."""
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


def list_tars(root: TarRoot, splits: Mapping[str, str] | None) -> dict[str, list[str]]:
    """List the names of the tars of every split, in order."""
    wanted = dict(splits) if splits is not None else SPLITS
    for split, there in wanted.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", split) or not INSIDE.fullmatch(re.sub(r"[{}]", "", there)):
            raise DataUsageError(
                f"split '{split}': '{there}' is no folder or pattern of tars below {redact(root.location)}"
            )
    found = {split: _tars(root, there) for split, there in wanted.items()}
    absent = [there for split, there in wanted.items() if not found[split]]
    if absent and (splits is not None or len(absent) == len(found)):
        where = f"{redact(root.location)} holds no shards of that name"
        if root.folder is not None:
            raise DataError(f"{where}: {' nor '.join(f'{there}/*.tar' for there in absent)} is not there")
        try:
            root.read(f"{absent[0]}/{COUNT_FILE}")
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    return {split: names for split, names in found.items() if names}


def _tars(root: TarRoot, there: str) -> list[str]:
    if there.endswith(".tar"):
        return _expanded(there)
    text = root.find_text(f"{there}/{COUNT_FILE}")
    if text is not None:
        return _counted(root, there, text)
    return _globbed(root.folder, there) if root.folder is not None else []


def _counted(root: TarRoot, there: str, text: str) -> list[str]:
    digits = text.strip()
    if not re.fullmatch(r"[0-9]{1,6}", digits) or not 0 < int(digits) <= MOST_TARS:
        raise DataError(
            f"{redact(root.location)}: {there}/{COUNT_FILE} says {digits[:40]!r}, not how many tars there are"
        )
    names = [f"{there}/{number}.tar" for number in range(int(digits))]
    if root.folder is not None:
        beside = {f"{there}/{name}" for name in _tar_names(root.folder / there)}
        if beside != set(names):
            example = sorted(beside ^ set(names))[0]
            state = "is not one of them" if example in beside else "is missing"
            raise DataError(f"{root.folder}: {there}/{COUNT_FILE} counts {digits} tars, but {example} {state}")
    return names


def _globbed(folder: Path, there: str) -> list[str]:
    inside = [f"{there}/{name}" for name in _tar_names(folder / there)]
    named = re.compile(rf"(.*[-_.])?{re.escape(there)}([-_.].*)?\.tar")
    names = sorted(inside or filter(named.fullmatch, _tar_names(folder)), key=_natural)
    _refuse_gap(folder, names)
    return names


def _tar_names(folder: Path) -> list[str]:
    # macOS writes a hidden file "._name" beside every file that it copies to other file systems.
    return [file.name for file in folder.glob("*.tar") if not file.name.startswith(".")]


def _refuse_gap(folder: Path, names: Sequence[str]) -> None:
    """Refuse a gap in numbered tars: a tar that was not downloaded must not be left out silently."""
    numbered = [re.fullmatch(r"(.*?)([0-9]+)((?:-of-[0-9]+)?\.tar)", name) for name in names]
    matches = [match for match in numbered if match]
    if len(matches) != len(names) or len({(match[1], match[3]) for match in matches}) != 1:
        return
    for before, after in pairwise(matches):
        if int(after[2]) != int(before[2]) + 1:
            missing = f"{before[1]}{int(before[2]) + 1:0{len(before[2])}}{before[3]}"
            raise DataError(f"{folder / missing} is missing, tars before and after it are there; get it too")


def _expanded(pattern: str) -> list[str]:
    """Expand `x-{000..009}.tar` to ten names; a pattern without a range is one name."""
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
    # Every second part is a number. `isdigit` would not do: the text between may hold digits of another script.
    return [(int(part), "") if odd % 2 else (-1, part) for odd, part in enumerate(re.split(r"([0-9]+)", name))]


def read_classnames(root: TarRoot) -> tuple[str, ...]:
    text = root.find_text("classnames.txt")
    names = tuple(line.strip() for line in (text or "").splitlines())
    if not names or not all(names):
        raise DataUsageError(
            f"{redact(root.location)} has no classnames.txt with a name per class: give the class names"
        )
    return names


def tar_source(
    name: str,
    location: str,
    *,
    splits: Mapping[str, str] | None = None,
    classnames: Sequence[str] | None,
    template: str,
    templates: Sequence[str],
    origin: str,
    cache: Path,
    on_progress: Progress | None = None,
) -> Source:
    """Make a source of the tars at `location`, a folder or a URL.

    splits: the folder of each of our splits below `location`, or a pattern of tars such as `x-train-{000..009}.tar`;
        default: the existing ones of train, val and test.
    classnames: in label order; None reads classnames.txt at `location`.
    cache: where tars from a URL are kept until they are packed. Every sample's label is read; images are not.
    origin: a description of the shards; a digest of their lists is added, so that changed shards are packed again.
    Raises DataError naming a tar that is missing, truncated or not safe to read, and DataUsageError for impossible
    splits or names.
    """
    root = TarRoot(location, cache, on_progress)
    names = tuple(classnames) if classnames is not None else read_classnames(root)
    tars = _scan_all(root, splits, len(names))
    return _source(name, names, template, templates, f"{origin}, lists {_digest(tars)}", tars)


def public_source(dataset: Dataset, location: str, cache: Path, *, on_progress: Progress | None = None) -> Source:
    """Make a source of a published data set's test images from its clip-benchmark shards, with our names and prompts.

    Raises DataUsageError if those shards hold other images than CoOp's test list, or are another data set's, and
    DataError when number of images or labels differ from the catalogue.
    """
    from shards.raw.classnames import published_classnames

    repository = _usable(dataset, location)
    root = TarRoot(location, cache, on_progress)
    other = f"{redact(location)} is not {repository}"
    named = root.find_text("classnames.txt")
    if named is not None and len(named.splitlines()) != dataset.classes:
        raise DataError(f"{other}: it names {len(named.splitlines())} classes, {dataset.title} has {dataset.classes}")
    names = published_classnames(dataset)
    if named is not None and (moved := _moved(named.splitlines(), names)):
        raise DataError(f"{other}: its classes have another order, the first is {moved}")
    tars = _scan_all(root, {"test": "test"}, dataset.classes)
    found, expected = sum(map(len, tars["test"])), dataset.counts["test"]
    if found != expected:
        raise DataError(f"{other}: its test split has {found:,} images, {dataset.title} has {expected:,}")
    missing = sorted(set(range(dataset.classes)) - {label for index in tars["test"] for label in index.labels.tolist()})
    if missing:
        raise DataError(f"{other}: no image has label {missing[0]} ({len(missing)} of {dataset.classes} are missing)")
    origin = public_origin(dataset)
    return _source(dataset.name, names, dataset.template, dataset.templates, origin, tars)


def _moved(found: Sequence[str], names: Sequence[str]) -> str:
    """Describe the first class whose position differs from ours; "" if none, or if the spelling is unknown here."""

    def key(name: str) -> tuple[str, ...]:
        # Compare sets of words: "Audi TTS Coupe 2012" there is "2012 Audi TTS Coupe" here.
        return tuple(sorted(re.findall(r"\w+", name.lower().replace("_", " "))))

    ours = list(map(key, names))
    for number, name in enumerate(found):
        if ours[number] != key(name) and key(name) in ours:
            return f"{name!r} as class {number}, here it is class {ours.index(key(name))}"
    return ""


def public_origin(dataset: Dataset) -> str:
    """Describe the origin of a set from its public shards, for its manifest."""
    repository = dataset.raw.public.repository if dataset.raw else ""
    return f"clip-benchmark {repository}, published shards"


def remove_downloads(location: str, cache: Path) -> None:
    """Delete what was downloaded from a URL, after it was packed."""
    if is_url(location):
        shutil.rmtree(working_folder(location, cache), ignore_errors=True)


@dataclass(frozen=True)
class TarPart:
    """Consecutive images of a split, read from their tars by offset."""

    indexes: tuple[TarIndex, ...]

    def records(self) -> Iterator[Record]:
        for index in self.indexes:
            try:
                with index.file.open("rb") as stream:
                    for offset, size, label, path in zip(
                        index.offsets.tolist(), index.sizes.tolist(), index.labels.tolist(), index.paths, strict=True
                    ):
                        data = os.pread(stream.fileno(), size, offset)
                        if len(data) != size:
                            raise DataError(f"{index.file} was cut short while it was read")
                        yield Record(path.decode(), label, data)
            except OSError as error:
                raise DataError(f"{index.file} cannot be read ({error.strerror})") from error

    def stamp(self) -> str:
        digest = hashlib.sha256()
        for index in self.indexes:
            try:
                facts = index.file.stat()
            except OSError as error:
                raise DataError(f"{index.file} cannot be read ({error.strerror})") from error
            digest.update(f"{index.file.name} {facts.st_size} {facts.st_mtime_ns} {index.paths.dtype}\n".encode())
            for column in (index.offsets, index.sizes, index.labels, index.paths):
                digest.update(column.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Tars:
    by_split: Mapping[str, tuple[TarIndex, ...]]

    def part(self, split: str, start: int, stop: int) -> TarPart:
        indexes, first = [], 0
        for index in self.by_split[split]:
            part = index.part(max(0, start - first), max(0, stop - first))
            indexes += [part] if len(part) else []
            first += len(index)
        return TarPart(tuple(indexes))


def _source(
    name: str,
    classnames: tuple[str, ...],
    template: str,
    templates: Sequence[str],
    origin: str,
    tars: Mapping[str, tuple[TarIndex, ...]],
) -> Source:
    counts = {split: sum(map(len, indexes)) for split, indexes in tars.items()}
    size = sum(int(index.sizes.sum()) for indexes in tars.values() for index in indexes)
    return Source(name, classnames, template, tuple(templates), origin, counts, _Tars(tars).part, size)


def _digest(tars: Mapping[str, Iterable[TarIndex]]) -> str:
    """Compute 16 hex digits that change with any name, label or size of an image, but not with the cuts of the tars."""
    total = hashlib.sha256()
    for split, indexes in tars.items():
        total.update(f"{split}\n".encode())
        for index in indexes:
            for facts in zip(index.paths.tolist(), index.labels.tolist(), index.sizes.tolist(), strict=True):
                total.update(b"%s\t%d\t%d\n" % facts)
    return total.hexdigest()[:16]


def _scan_all(root: TarRoot, splits: Mapping[str, str] | None, classes: int) -> dict[str, tuple[TarIndex, ...]]:
    kind = (root.find_text("dataset_type.txt") or "classification").strip()
    if kind != "classification":
        what = f"{redact(root.location)} holds a {kind[:40]!r} data set"
        raise DataUsageError(f"{what}: only classification sets can be used")
    return {split: tuple(_scanned(root, split, names, classes)) for split, names in list_tars(root, splits).items()}


def _scanned(root: TarRoot, split: str, names: Iterable[str], classes: int) -> Iterator[TarIndex]:
    keys: set[bytes] = set()
    paths: set[bytes] = set()
    for name in names:
        file = root.local_file(name)
        try:
            index = scan_tar(file, split)
            _refuse_repeats(index, keys, paths)
            wrong = np.flatnonzero(index.labels >= classes)
            if len(wrong):
                sample = f"sample '{index.keys[wrong[0]].decode()}' with label {index.labels[wrong[0]]}"
                raise TarProblem(f"has {sample}, but labels go from 0 to {classes - 1}")
        except TarProblem as problem:
            if root.folder is None:
                file.unlink(missing_ok=True)
            named = file if root.folder is not None else redact(join(canonical(root.location), name))
            raise DataError(f"{named} {problem}") from None
        yield index


def _refuse_repeats(index: TarIndex, keys: set[bytes], paths: set[bytes]) -> None:
    for kind, column, seen in (("sample", index.keys, keys), ("image", index.paths, paths)):
        for each in column.tolist():
            if each in seen:
                raise TarProblem(f"has {kind} '{each.decode()}' for the second time: keys must be unique in a split")
            seen.add(each)


def _usable(dataset: Dataset, location: str) -> str:
    """Return the repository of a published set's test images; refuses other sets and places of other sets."""
    if dataset.raw is None:
        raise DataUsageError(f"'{dataset.name}' has no published shards; pack it with: procap data pack {dataset.name}")
    if dataset.variant:
        raise DataUsageError(f"'{dataset.name}' is not a published set ({dataset.variant}); pack it from raw folders")
    public = dataset.raw.public
    if not public.usable:
        why = f"{public.repository} cannot stand for CoOp's {dataset.title}: " if public.repository else ""
        instead = f"pack it from raw folders: procap data pack {dataset.name} --raw FOLDER"
        raise DataUsageError(f"'{dataset.name}': {why}{public.reason}; {instead}")
    owners = {
        other.raw.public.repository: other.name for other in PUBLISHED if other.raw and other.raw.public.repository
    }
    hub = re.match(r"https?://huggingface\.co/datasets/clip-benchmark/([^/?#]+)", location)
    named = [hub[1]] if hub else [part for part in re.split(r"[/?#]", location) if part in owners]
    for other in named:
        if other != public.repository:
            whose = f" ({owners[other]})" if other in owners else ""
            raise DataUsageError(f"{other}{whose} is not {dataset.title}, whose shards are {public.repository}")
    return public.repository
