"""Shards that others published, in the layout of clip-benchmark or as named tars, as a source to be packed from.

A split is a folder with `nshards.txt` and `0.tar`, `1.tar`, ..., or with any tars, or the tars `<name>-<split>-000.tar`
of the folder itself. What lies behind a URL is downloaded to a working folder first, which `remove_downloads` empties.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.dataset import Dataset
from shards.errors import DataError, DataUsageError
from shards.published import PUBLISHED
from shards.raw.tarlists import Place, Progress, classnames_of, listed, working_folder
from shards.raw.tarscan import TarIndex, TarProblem, scan
from shards.records import Record, Source
from shards.urls import canonical, is_url, join, redact


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
    """The data set in the tars at `location`, a folder or a URL.

    splits: what our splits are called there: a folder, or a pattern of tars such as `x-train-{000..009}.tar`; by
    default those of train, val and test that are there. classnames: in label order; None takes classnames.txt there.
    cache: where tars from a URL are kept until they are packed. Every sample's label is read; images are not.
    origin: what the shards are, in words; a digest of their lists is added, so that other ones are packed again.
    Raises DataError naming the tar for whatever is not whole, not there or not to be trusted, and DataUsageError for
    splits or names that cannot be meant.
    """
    place = Place(location, cache, on_progress)
    names = tuple(classnames) if classnames is not None else classnames_of(place)
    tars = _scan_all(place, splits, len(names))
    return _source(name, names, template, templates, f"{origin}, lists {_digest(tars)}", tars)


def public_source(dataset: Dataset, location: str, cache: Path, *, on_progress: Progress | None = None) -> Source:
    """The test images of a published data set from its clip-benchmark shards, with our class names and prompts.

    Raises DataUsageError where those shards hold other images than CoOp's test list, or are another data set's, and
    DataError when number of images or labels differ from the catalogue.
    """
    from shards.raw.classnames import published_classnames

    repository = _usable(dataset, location)
    place = Place(location, cache, on_progress)
    other = f"{redact(location)} is not {repository}"
    named = place.text("classnames.txt")
    if named is not None and len(named.splitlines()) != dataset.classes:
        raise DataError(f"{other}: it names {len(named.splitlines())} classes, {dataset.title} has {dataset.classes}")
    names = published_classnames(dataset)
    if named is not None and (moved := _moved(named.splitlines(), names)):
        raise DataError(f"{other}: its classes have another order, the first is {moved}")
    tars = _scan_all(place, {"test": "test"}, dataset.classes)
    found, expected = sum(map(len, tars["test"])), dataset.counts["test"]
    if found != expected:
        raise DataError(f"{other}: its test split has {found:,} images, {dataset.title} has {expected:,}")
    missing = sorted(set(range(dataset.classes)) - {label for index in tars["test"] for label in index.labels.tolist()})
    if missing:
        raise DataError(f"{other}: no image has label {missing[0]} ({len(missing)} of {dataset.classes} are missing)")
    origin = public_origin(dataset)
    return _source(dataset.name, names, dataset.template, dataset.templates, origin, tars)


def _moved(found: Sequence[str], names: Sequence[str]) -> str:
    """The first class that stands at another place than ours, or ""; spellings that only they use say nothing."""

    def key(name: str) -> tuple[str, ...]:
        # "Audi TTS Coupe 2012" is our "2012 Audi TTS Coupe".
        return tuple(sorted(re.findall(r"\w+", name.lower().replace("_", " "))))

    ours = list(map(key, names))
    for place, name in enumerate(found):
        if ours[place] != key(name) and key(name) in ours:
            return f"{name!r} as class {place}, here it is class {ours.index(key(name))}"
    return ""


def public_origin(dataset: Dataset) -> str:
    """What the manifest of a set from its public shards says of where its images come from."""
    repository = dataset.raw.public.repository if dataset.raw else ""
    return f"clip-benchmark {repository}, published shards"


def remove_downloads(location: str, cache: Path) -> None:
    """Free the disk of what was downloaded from a URL, once it is packed."""
    if is_url(location):
        shutil.rmtree(working_folder(location, cache), ignore_errors=True)


@dataclass(frozen=True)
class TarPart:
    """Consecutive images of a split, read from their tars by offset."""

    pieces: tuple[TarIndex, ...]

    def records(self) -> Iterator[Record]:
        for piece in self.pieces:
            try:
                with piece.file.open("rb") as stream:
                    for offset, size, label, path in zip(
                        piece.offsets.tolist(), piece.sizes.tolist(), piece.labels.tolist(), piece.paths, strict=True
                    ):
                        data = os.pread(stream.fileno(), size, offset)
                        if len(data) != size:
                            raise DataError(f"{piece.file} was cut short while it was read")
                        yield Record(path.decode(), label, data)
            except OSError as error:
                raise DataError(f"{piece.file} cannot be read ({error.strerror})") from error

    def stamp(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces:
            try:
                facts = piece.file.stat()
            except OSError as error:
                raise DataError(f"{piece.file} cannot be read ({error.strerror})") from error
            digest.update(f"{piece.file.name} {facts.st_size} {facts.st_mtime_ns} {piece.paths.dtype}\n".encode())
            for column in (piece.offsets, piece.sizes, piece.labels, piece.paths):
                digest.update(column.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Tars:
    by_split: Mapping[str, tuple[TarIndex, ...]]

    def part(self, split: str, start: int, stop: int) -> TarPart:
        pieces, first = [], 0
        for index in self.by_split[split]:
            piece = index.part(max(0, start - first), max(0, stop - first))
            pieces += [piece] if len(piece) else []
            first += len(index)
        return TarPart(tuple(pieces))


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
    """16 hex digits that change with any name, label or size of an image, and not with how tars are cut."""
    total = hashlib.sha256()
    for split, indexes in tars.items():
        total.update(f"{split}\n".encode())
        for index in indexes:
            for facts in zip(index.paths.tolist(), index.labels.tolist(), index.sizes.tolist(), strict=True):
                total.update(b"%s\t%d\t%d\n" % facts)
    return total.hexdigest()[:16]


def _scan_all(place: Place, splits: Mapping[str, str] | None, classes: int) -> dict[str, tuple[TarIndex, ...]]:
    kind = (place.text("dataset_type.txt") or "classification").strip()
    if kind != "classification":
        what = f"{redact(place.location)} holds a {kind[:40]!r} data set"
        raise DataUsageError(f"{what}: only classification sets can be used")
    return {split: tuple(_scanned(place, split, names, classes)) for split, names in listed(place, splits).items()}


def _scanned(place: Place, split: str, names: Iterable[str], classes: int) -> Iterator[TarIndex]:
    keys: set[bytes] = set()
    paths: set[bytes] = set()
    for name in names:
        file = place.here(name)
        try:
            index = scan(file, split)
            _refuse_repeats(index, keys, paths)
            wrong = np.flatnonzero(index.labels >= classes)
            if len(wrong):
                sample = f"sample '{index.keys[wrong[0]].decode()}' with label {index.labels[wrong[0]]}"
                raise TarProblem(f"has {sample}, but labels go from 0 to {classes - 1}")
        except TarProblem as problem:
            if place.folder is None:
                file.unlink(missing_ok=True)
            named = file if place.folder is not None else redact(join(canonical(place.location), name))
            raise DataError(f"{named} {problem}") from None
        yield index


def _refuse_repeats(index: TarIndex, keys: set[bytes], paths: set[bytes]) -> None:
    for kind, column, seen in (("sample", index.keys, keys), ("image", index.paths, paths)):
        for each in column.tolist():
            if each in seen:
                raise TarProblem(f"has {kind} '{each.decode()}' for the second time: keys must be unique in a split")
            seen.add(each)


def _usable(dataset: Dataset, location: str) -> str:
    """The repository that holds the test images of a published set; refuses other sets and places of other sets."""
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
