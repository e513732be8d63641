"""Raw image folders: list images, find which of them exist, and read them for packing.

Nothing in `shards.raw` writes below a raw folder. Names in lists and on the disk are untrusted: see `unsafe_path`.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shards.errors import DataError
from shards.records import Record
from shards.tar import IMAGES

IMAGE_EXTENSIONS = frozenset((*IMAGES, "jpeg"))

# Files that are measured for an estimate within 1 to 2 %; a million `stat` calls on a network disk take minutes.
SIZE_SAMPLE = 5_000

# Largest file that is read, because files are read as a whole. An image of 100 million pixels with 3 bytes fits.
FILE_LIMIT = 500_000_000

UNCHANGED = "put an unchanged copy of the published file there"


class RawProblem(DataError):
    """Something wrong with raw files: what and where, and what would work."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


@dataclass(frozen=True)
class Rows:
    """Images of one split in list order: paths relative to the images' folder, and a label for each."""

    paths: Sequence[str]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.paths)

    def only(self, keep: Iterable[bool]) -> Rows:
        kept = [i for i, there in enumerate(keep) if there]
        return self if len(kept) == len(self) else Rows([self.paths[i] for i in kept], [self.labels[i] for i in kept])


@dataclass(frozen=True)
class Listing:
    """The lists or class folders of a data set as they are, before the comparison with the published set.

    images: the folder that paths are relative to. origin: what the lists are, in words.
    scanned: the lists come from reading folders, so all their images exist.
    problems: faults that did not stop the listing; packing refuses a data set with any of them.
    """

    images: Path
    classnames: tuple[str, ...]
    splits: Mapping[str, Rows]
    origin: str
    scanned: bool = False
    problems: tuple[RawProblem, ...] = ()

    def lines(self, split: str) -> Iterator[str]:
        """Yield the lines that digests of published splits are computed from."""
        rows = self.splits[split]
        for path, label in zip(rows.paths, rows.labels, strict=True):
            yield f"{path}\t{label}\t{self.classnames[label]}"

    def digest(self) -> str:
        """Compute 16 hex digits that change with any path, label or name of any split."""
        total = hashlib.sha256()
        for split in self.splits:
            total.update(f"{split}\n".encode())
            for line in self.lines(split):
                total.update(f"{line}\n".encode())
        return total.hexdigest()[:16]


@dataclass(frozen=True)
class FolderPart:
    """Files below `root`, packed as they are under their relative paths."""

    root: Path
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def records(self) -> Iterator[Record]:
        """Read the files. Raises DataError naming a file that cannot be read."""
        for path, label in zip(self.paths, self.labels, strict=True):
            file = self.root / path
            try:
                if file.stat().st_size > FILE_LIMIT:
                    raise DataError(f"{file} has more than {FILE_LIMIT // 10**6:,} MB: it is no image to be packed")
                data = file.read_bytes()
            except OSError as error:
                raise _unreadable(file, error) from error
            yield Record(path, label, data)

    def stamp(self) -> str:
        """Compute a digest of paths, sizes and modification times."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                found = os.stat(self.root / path)
            except OSError as error:
                raise _unreadable(self.root / path, error) from error
            digest.update(f"{path}\t{found.st_size}\t{found.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(
        f"{file} cannot be read ({error.strerror or error}): put it back, or pack what is there as a subset"
    )


def unsafe_path(path: str) -> str:
    """Explain why a relative path is refused; "" for a plain path that stays inside its folder."""
    if not path or path.startswith("/"):
        return "is not a relative path"
    if not path.isprintable() and any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in path):
        return "holds characters that do not belong into a path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "is not a plain path inside the folder of the images"
    return ""


def is_image_name(name: str) -> bool:
    stem, _, extension = name.rpartition(".")
    return bool(stem) and extension.lower() in IMAGE_EXTENSIONS


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file or a link to one; False for a circular link."""
    try:
        return entry.is_file()
    except OSError:
        return False


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder, sorted by name, without hidden entries. Raises RawProblem if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable_folder(folder, error) from error


def image_names(folder: Path) -> tuple[list[str], list[str]]:
    """List the images of a class folder, sorted by name, and its other entries; hidden ones are left out."""
    images: list[str] = []
    others: list[str] = []
    for entry in entries(folder):
        name = entry.name
        (images if is_image_name(name) and not unsafe_path(name) and is_file(entry) else others).append(name)
    return images, others


def files_exist(root: Path, paths: Iterable[str]) -> Iterator[bool]:
    """Yield whether each path is a file below `root`; lists each folder once. Raises RawProblem if it cannot."""
    files: dict[str, frozenset[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in files:
            files[folder] = _files(root / folder)
        yield name in files[folder]


def _files(folder: Path) -> frozenset[str]:
    try:
        with os.scandir(folder) as found:
            return frozenset(entry.name for entry in found if is_file(entry))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        raise _unreadable_folder(folder, error) from error


def _unreadable_folder(folder: Path, error: OSError) -> RawProblem:
    return RawProblem(f"{folder} cannot be read ({error.strerror or error})", "make it a folder that you may read")


def file_sizes(root: Path, paths: Iterable[str]) -> Iterator[int]:
    """Yield the bytes of each file; 0 if it vanished, which reading it reports later."""
    for path in paths:
        try:
            yield os.stat(root / path).st_size
        except OSError:
            yield 0


def total_size(root: Path, paths: Sequence[str]) -> int:
    """Sum the bytes of all files; for many files estimate it from an even sample of the list."""
    sizes = list(file_sizes(root, paths[:: max(1, len(paths) // SIZE_SAMPLE)]))
    return round(sum(sizes) / len(sizes) * len(paths)) if sizes else 0
