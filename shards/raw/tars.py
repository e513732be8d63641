"""Read shards that others published, in clip-benchmark's layout or as named tars, as a source for packing.

A split is a folder with `nshards.txt` and `0.tar`, `1.tar`, ..., or with any tars, or the tars `<name>-<split>-000.tar`
of the folder itself. What lies behind a URL is downloaded to a working folder first, which `remove_downloads` empties.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shards.catalogue import PUBLISHED, Dataset
from shards.errors import DataError, DataUsageError, NotFound
from shards.raw.classnames import published_classnames
from shards.records import ImageRecord, Source
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
ExtractProgress = Callable[[str, int, int | None], None]


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
) -> Source:
    """Make a source of the tars at `location`, a folder or a URL; every sample's label is read, images are not.

    splits: the folder of each of our splits, or a pattern of tars such as `x-{000..009}.tar` (default: the existing
        ones of train, val and test). classnames: in label order; None reads classnames.txt.
    cache: where tars from a URL are kept until they are packed. origin: a digest of the lists is added to it.
    """
    root = TarRoot(location, cache)
    names = tuple(classnames) if classnames is not None else root.read_lines("classnames.txt")
    if not names or not all(names):
        raise DataUsageError(
            f"{redact(location)} has no classnames.txt with a name per class: list the class names under classes"
        )
    tars = root.scan(splits, len(names))
    # The digest changes with any name, label or size of an image, but not with the cuts of the tars.
    digest = hashlib.sha256()
    for split, indexes in tars.items():
        digest.update(f"{split}\n".encode())
        for index in indexes:
            for facts in index.rows[["path", "label", "size"]].tolist():
                digest.update(b"%s\t%d\t%d\n" % facts)
    return _make_source(name, names, template, templates, f"{origin}, lists {digest.hexdigest()[:16]}", tars)


def public_source(
    dataset: Dataset, location: str, cache: Path, *, on_progress: ExtractProgress | None = None
) -> Source:
    """Make a source of a published data set's test images from its clip-benchmark shards, with our names and prompts.

    Raises DataError if those shards hold other images than CoOp's test list, or are another data set's.
    """
    other = f"{redact(location)} is not {_find_repository(dataset, location)}"
    root, names = TarRoot(location, cache, on_progress), published_classnames(dataset)
    theirs = root.read_lines("classnames.txt")
    if theirs and len(theirs) != len(names):
        raise DataError(f"{other}: it names {len(theirs)} classes, {dataset.title} has {len(names)}")
    # Spellings differ; sets of words are compared ("Audi TTS Coupe 2012" and "2012 Audi TTS Coupe" are one class).
    words = [[sorted(re.findall(r"\w+", name.lower().replace("_", " "))) for name in each] for each in (theirs, names)]
    for number, key in enumerate(words[0]):
        if words[1][number] != key and key in words[1]:
            first = f"class {number} is {theirs[number]!r}, which {dataset.title} has as class {words[1].index(key)}"
            raise DataError(f"{other}: its classes have another order: {first}")
    tars = root.scan({"test": "test"}, len(names))
    found, expected = sum(map(len, tars["test"])), dataset.counts["test"]
    if found != expected:
        raise DataError(f"{other}: its test split has {found:,} images, {dataset.title} has {expected:,}")
    missing = sorted(set(range(len(names))).difference(*(index.rows["label"].tolist() for index in tars["test"])))
    if missing:
        raise DataError(f"{other}: no image has label {missing[0]} ({len(missing)} of {len(names)} are missing)")
    return _make_source(dataset.name, names, dataset.template, dataset.templates, public_origin(dataset), tars)


def _find_repository(dataset: Dataset, location: str) -> str:
    """Return the repository of a published set's test images; refuses other sets and places of other sets."""
    if dataset.raw is None:
        raise DataUsageError(f"'{dataset.name}' has no published shards; pack it with: procap data pack {dataset.name}")
    if dataset.variant:
        raise DataUsageError(f"'{dataset.name}' is not a published set ({dataset.variant}); pack it from raw folders")
    public, problem = dataset.raw.public, dataset.raw.public_problem
    if problem:
        why = f"{public} cannot stand for CoOp's {dataset.title}: " if public else ""
        instead = f"pack it from raw folders: procap data pack {dataset.name} --raw FOLDER"
        raise DataUsageError(f"'{dataset.name}': {why}{problem}; {instead}")
    repositories = {other.raw.public for other in PUBLISHED if other.raw} - {""}
    hub = re.match(r"https?://huggingface\.co/datasets/clip-benchmark/([^/?#]+)", location)
    for name in [hub[1]] if hub else repositories.intersection(re.split(r"[/?#]", location)):
        if name != public:
            raise DataUsageError(f"{name} is not {dataset.title}, whose shards are {public}")
    return public


def public_origin(dataset: Dataset) -> str:
    """Describe the origin of a set from its public shards, for its manifest."""
    return f"clip-benchmark {dataset.raw.public if dataset.raw else ''}, published shards"


def working_folder(location: str, cache: Path) -> Path:
    """Return the folder of a URL's tars between their download and `remove_downloads`."""
    return cache / "downloads" / cache_name(location)


def remove_downloads(location: str, cache: Path) -> None:
    """Delete what was downloaded from a URL, after it was packed."""
    if is_url(location):
        shutil.rmtree(working_folder(location, cache), ignore_errors=True)


@dataclass(frozen=True)
class TarRoot:
    """A folder or a URL with tars in it; names below it have forward slashes."""

    location: str
    cache: Path
    on_progress: ExtractProgress | None = None

    @property
    def folder(self) -> Path | None:
        """The local folder, None for a URL."""
        return local_path(self.location)

    def read(self, name: str) -> str:
        """Read a text file of the convention. Raises DataError, NotFound if there is none."""
        url = join(canonical(self.location), name)
        try:
            return read_bytes(url, TEXT_LIMIT).decode()
        except UnicodeDecodeError:
            raise DataError(f"{redact(url)} is no short text file in UTF-8") from None

    def read_lines(self, name: str) -> tuple[str, ...]:
        """Read the lines of a text file of the convention, none if there is no such file."""
        try:
            return tuple(line.strip() for line in self.read(name).splitlines())
        except NotFound:
            return ()

    def scan(self, splits: Mapping[str, str] | None, classes: int) -> dict[str, tuple[TarIndex, ...]]:
        """Read the labels and offsets of every split; labels must go below `classes`, keys be unique in a split."""
        for kind in self.read_lines("dataset_type.txt"):
            if kind not in ("", "classification"):
                what = f"{redact(self.location)} holds a {kind[:40]!r} data set"
                raise DataUsageError(f"{what}: only classification sets can be used")
        return {split: tuple(self._scan_split(split, names, classes)) for split, names in self._list(splits).items()}

    def _scan_split(self, split: str, names: Sequence[str], classes: int) -> Iterator[TarIndex]:
        keys: set[bytes] = set()
        paths: set[bytes] = set()
        for name in names:
            url = join(canonical(self.location), name)
            if self.folder is not None:
                file = self.folder / name
            else:
                file = working_folder(self.location, self.cache) / name
                download(url, file, on_progress=partial(self.on_progress, name) if self.on_progress else None)
            try:
                index = scan_tar(file, split)
                for kind, column, earlier in (("sample", "key", keys), ("image", "path", paths)):
                    for text in index.rows[column].tolist():
                        if text in earlier:
                            raise TarProblem(f"has {kind} '{text.decode()}' for the second time in this split")
                        earlier.add(text)
                for wrong in index.rows[index.rows["label"] >= classes][:1]:
                    sample = f"sample '{wrong['key'].decode()}' with label {wrong['label']}"
                    raise TarProblem(f"has {sample}, but labels go from 0 to {classes - 1}")
            except TarProblem as problem:
                if self.folder is not None:
                    raise DataError(f"{file} {problem}") from None
                file.unlink(missing_ok=True)
                raise DataError(f"{redact(url)} {problem}") from None
            yield index

    def _list(self, splits: Mapping[str, str] | None) -> dict[str, list[str]]:
        """List the names of the tars of every split, in order."""
        wanted = SPLITS if splits is None else splits
        for split, pattern in wanted.items():
            if not re.fullmatch(r"[a-z][a-z0-9_-]*", split) or not INSIDE.fullmatch(re.sub(r"[{}]", "", pattern)):
                where = f"no folder or pattern of tars below {redact(self.location)}"
                raise DataUsageError(f"split '{split}': '{pattern}' is {where}")
        found = {split: self._list_split(pattern) for split, pattern in wanted.items()}
        absent = [pattern for split, pattern in wanted.items() if not found[split]]
        if absent and (splits is not None or len(absent) == len(found)):
            where = f"{redact(self.location)} holds no shards of that name"
            if self.folder is not None:
                raise DataError(f"{where}: {' nor '.join(f'{name}/*.tar' for name in absent)} is not there")
            try:
                self.read(f"{absent[0]}/{COUNT_FILE}")
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        return {split: names for split, names in found.items() if names}

    def _list_split(self, pattern: str) -> list[str]:
        if pattern.endswith(".tar"):
            return _expand_range(pattern)
        try:
            count = self.read(f"{pattern}/{COUNT_FILE}").strip()
        except NotFound:
            return _find_tars(self.folder, pattern) if self.folder is not None else []
        if not re.fullmatch(r"[0-9]{1,6}", count) or not 0 < int(count) <= MOST_TARS:
            where = f"{redact(self.location)}: {pattern}/{COUNT_FILE}"
            raise DataError(f"{where} holds {count[:40]!r}, not the number of tars")
        names = [f"{pattern}/{number}.tar" for number in range(int(count))]
        if self.folder is not None:
            differing = sorted({f"{pattern}/{name}" for name in _tar_names(self.folder / pattern)} ^ set(names))
            if differing:
                state = "is not there" if differing[0] in names else "is not one of them"
                raise DataError(
                    f"{self.folder}: {pattern}/{COUNT_FILE} counts {count} tars, but {differing[0]} {state}"
                )
        return names


def _expand_range(pattern: str) -> list[str]:
    """Expand `x-{000..009}.tar` to ten names; a pattern without a range is one name."""
    # braceexpand, which comes with webdataset, would build a list of any length that a pattern gives.
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    match = re.fullmatch(r"([^{}]*)\{([0-9]+)\.\.([0-9]+)\}([^{}]*)", pattern)
    if match is None or not int(match[2]) <= int(match[3]) < int(match[2]) + MOST_TARS:
        raise DataUsageError(f"'{pattern}' is no range of at most {MOST_TARS:,} tars, such as x-{{000..009}}.tar")
    numbers = range(int(match[2]), int(match[3]) + 1)
    return [f"{match[1]}{number:0{len(match[2])}}{match[4]}" for number in numbers]


def _find_tars(folder: Path, split: str) -> list[str]:
    """List the tars in a split's folder, or those of its name, in natural order; a gap in their numbers is an error."""
    named = re.compile(rf"(.*[-_.])?{re.escape(split)}([-_.].*)?\.tar")
    names = [f"{split}/{name}" for name in _tar_names(folder / split)]
    names = names or [name for name in _tar_names(folder) if named.fullmatch(name)]
    # Every second part is a number. `isdigit` would not do: the text between may hold digits of another script.
    parts = {name: re.split(r"([0-9]+)", name) for name in names}
    names.sort(key=lambda name: [(int(part), "") if odd % 2 else (-1, part) for odd, part in enumerate(parts[name])])
    matches = [re.fullmatch(r"(.*?)([0-9]+)((?:-of-[0-9]+)?\.tar)", name) for name in names]
    numbers = [int(match[2]) for match in matches if match]
    if len(numbers) == len(names) and len({(match[1], match[3]) for match in matches if match}) == 1:
        for number, match in enumerate(matches, numbers[0]):
            if match and int(match[2]) != number:
                missing = f"{match[1]}{number:0{len(match[2])}}{match[3]}"
                raise DataError(f"{folder / missing} is missing, tars before and after it are there; get it too")
    return names


def _tar_names(folder: Path) -> list[str]:
    # macOS writes a hidden file "._name" beside every file that it copies to other file systems.
    return [file.name for file in folder.glob("*.tar") if not file.name.startswith(".")]


@dataclass(frozen=True)
class TarPart:
    """Consecutive images of a split, read from their tars by offset."""

    indexes: tuple[TarIndex, ...]

    def records(self) -> Iterator[ImageRecord]:
        for index in self.indexes:
            try:
                with index.file.open("rb") as stream:
                    for offset, size, label, _, path in index.rows.tolist():
                        data = os.pread(stream.fileno(), size, offset)
                        if len(data) != size:
                            raise DataError(f"{index.file} was cut short while it was read")
                        yield ImageRecord(path.decode(), label, data)
            except OSError as error:
                raise DataError(f"{index.file} cannot be read ({error.strerror})") from error

    def stamp(self) -> str:
        digest = hashlib.sha256()
        for index in self.indexes:
            try:
                facts = index.file.stat()
            except OSError as error:
                raise DataError(f"{index.file} cannot be read ({error.strerror})") from error
            digest.update(f"{index.file.name} {facts.st_size} {facts.st_mtime_ns} {index.rows.dtype}\n".encode())
            digest.update(index.rows.tobytes())
        return digest.hexdigest()


def _make_source(
    name: str,
    classnames: tuple[str, ...],
    template: str,
    templates: Sequence[str],
    origin: str,
    tars: Mapping[str, tuple[TarIndex, ...]],
) -> Source:
    def part(split: str, start: int, stop: int) -> TarPart:
        indexes, first = [], 0
        for index in tars[split]:
            indexes.append(index.part(max(0, start - first), max(0, stop - first)))
            first += len(index)
        return TarPart(tuple(index for index in indexes if len(index)))

    counts = {split: sum(map(len, indexes)) for split, indexes in tars.items()}
    size = sum(int(index.rows["size"].sum()) for indexes in tars.values() for index in indexes)
    return Source(name, classnames, template, tuple(templates), origin, counts, part, size)
