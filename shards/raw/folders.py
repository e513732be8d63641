"""Raw image folders: list images, find missing ones, split them at random, and read them for packing.

Nothing in `shards.raw` writes below a raw folder. Names in lists and on the disk are untrusted: see `shards.names`.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

from procap.errors import UserError
from shards.files import read_regular
from shards.records import ImageRecord
from shards.tar import IMAGES

Images = list[tuple[str, int]]
"""Images of one split in list order: a path relative to the folder of the images, and a label."""

IMAGE_EXTENSIONS = frozenset((*IMAGES, "jpeg"))


@dataclass(frozen=True)
class Listing:
    """The labelled images below one folder, by split: from lists, from class folders, or drawn at random.

    root: the folder that paths are relative to. origin: what the lists are. scanned: they come from reading folders.
    """

    root: Path
    classnames: tuple[str, ...]
    splits: Mapping[str, Images]
    origin: str
    scanned: bool = False

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(images) for split, images in self.splits.items()}

    @property
    def paths(self) -> list[str]:
        return [path for images in self.splits.values() for path, _ in images]

    def lines(self, split: str) -> Iterator[str]:
        """Yield the lines that digests of published splits are computed from."""
        return (f"{path}\t{label}\t{self.classnames[label]}" for path, label in self.splits[split])

    def digest(self) -> str:
        """Compute 16 hex digits that change with any path, label or name of any split."""
        total = hashlib.sha256()
        for split in self.splits:
            for line in (split, *self.lines(split)):
                total.update(f"{line}\n".encode())
        return total.hexdigest()[:16]

    def part(self, split: str, start: int, stop: int) -> FolderPart:
        paths, labels = zip(*self.splits[split][start:stop], strict=True)
        return FolderPart(self.root, paths, labels)


@dataclass(frozen=True)
class FolderPart:
    """Files below `root`, packed under their relative paths as they are."""

    root: Path
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def records(self) -> Iterator[ImageRecord]:
        """Read the files. Raises UserError naming a file that cannot be read."""
        for path, label in zip(self.paths, self.labels, strict=True):
            try:
                data = read_regular(self.root / path)
            except OSError as error:
                raise_unreadable(error)
            yield ImageRecord(path, label, data)


def raise_unreadable(error: OSError) -> NoReturn:
    """Raise UserError that names the file or folder of an error."""
    raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error


def list_folder(folder: Path) -> dict[str, str]:
    """Map the sorted names in a folder to "folder" or "file"; links are followed, hidden names left out."""
    try:
        with os.scandir(folder) as entries:
            shown = {entry.name: entry for entry in entries if not entry.name.startswith(".")}
            # The order of `scandir` differs between file systems, and few-shot draws depend on the order of a list.
            return {name: "folder" if shown[name].is_dir() else "file" for name in sorted(shown)}
    except OSError as error:
        raise_unreadable(error)


def is_image_name(file: str) -> bool:
    """Whether a file name has the extension of an image format that is read."""
    stem, _, extension = file.rpartition(".")
    return bool(stem) and extension.lower() in IMAGE_EXTENSIONS


def missing_images(root: Path, images: Images) -> list[str]:
    """List the paths of images that are no files below `root`."""
    return [path for path, _ in images if not os.path.isfile(root / path)]


def file_sizes(root: Path, paths: Iterable[str]) -> list[int]:
    """List the bytes of each file. Raises UserError for a file that was deleted after it was listed."""
    try:
        return [os.stat(root / path).st_size for path in paths]
    except OSError as error:
        raise_unreadable(error)


def split_classes(images: Images, fractions: Mapping[str, float], seed: int) -> dict[str, Images]:
    """Shuffle each class, in order of first appearance, and cut it into `fractions`; the last takes the rest.

    CoOp's rule, with a separate random stream instead of the global one.
    """
    draw = random.Random(seed)
    by_class: dict[int, list[str]] = {}
    for path, label in images:
        by_class.setdefault(label, []).append(path)
    splits: dict[str, Images] = {split: [] for split in fractions}
    for label, paths in by_class.items():
        draw.shuffle(paths)
        rest = iter(paths)
        for split, size in split_sizes(len(paths), fractions).items():
            splits[split] += [(path, label) for path in islice(rest, size)]
    return splits


def small_classes(images: Images, classnames: Sequence[str], fractions: Mapping[str, float]) -> list[str]:
    """Describe the classes with too few images for `fractions`."""
    counts = Counter(label for _, label in images)
    return [
        f"class {name!r} has too few images for {', '.join(fractions)}: add images or change the fractions"
        for label, name in enumerate(classnames)
        if not split_sizes(counts[label], fractions)
    ]


def split_sizes(count: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Divide `count` images by `fractions`, of which the last takes the rest; empty if one of them would get none."""
    sizes = {split: round(fraction * count) for split, fraction in fractions.items()}
    last = [*fractions][-1]
    sizes[last] = count - sum(size for split, size in sizes.items() if split != last)
    return sizes if min(sizes.values()) > 0 else {}
