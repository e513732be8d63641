"""Read packed data sets by position: labels and paths from the index, images from the tars by offset.

Nothing that differs from the manifest is ever read silently: a shard that is missing, cut short or altered is refused
by name when its split is opened, an image that does not decode when it is read. Shapes: N images of a split.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shards.checks import check_files, check_hashes, hash_problem, read_index, size_problem
from shards.errors import DataError, DataUsageError
from shards.manifest import Manifest, convention_texts, read_manifest
from shards.tar import Index, sample_key

if TYPE_CHECKING:
    from PIL.Image import Image


# A broken shard of thousands of images is told by a few of them.
NAMED = 3


class ShardFiles:
    """The open shards of one split; safe to share with forked and spawned processes and with threads."""

    def __init__(self, dataset: str, files: Sequence[Path]) -> None:
        self.dataset = dataset
        self.files = tuple(files)
        self._open: dict[tuple[int, int], int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "files": self.files, "_open": {}}

    def __del__(self) -> None:
        for (process, _), descriptor in self._open.items():
            if process == os.getpid():
                os.close(descriptor)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes at `offset` of a shard; raises DataError when they are not there."""
        file = self.files[shard]
        try:
            descriptor = self._open.get((os.getpid(), shard))
            if descriptor is None:
                opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                descriptor = self._open.setdefault((os.getpid(), shard), opened)
                if descriptor != opened:
                    os.close(opened)
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            raise DataError(f"'{self.dataset}': {file} cannot be read ({error.strerror})") from error
        if len(data) != size:
            read = f"{len(data)} of {size} bytes at {offset}"
            raise DataError(f"'{self.dataset}': {file} was cut short while in use ({read})")
        return data


class Split:
    """A list of images, all of a split or a selection, with its labels [N] and paths."""

    def __init__(
        self,
        files: ShardFiles,
        positions: NDArray[np.int64],
        columns: Mapping[str, NDArray[np.int64]],
        labels: NDArray[np.int64],
        paths: list[str],
    ) -> None:
        self._files, self._columns = files, columns
        self.positions = positions
        self.labels = labels
        self.paths = paths

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> bytes:
        """The encoded bytes of image `i`."""
        column = self._columns
        return self._files.read(int(column["shard"][i]), int(column["offset"][i]), int(column["size"][i]))

    def image(self, i: int) -> Image:
        """Image `i` decoded to RGB; raises DataError naming shard, member and path when it is undecodable."""
        from PIL import Image

        data = self.read(i)
        try:
            with Image.open(io.BytesIO(data)) as image:
                return image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            shard = self._files.files[int(self._columns["shard"][i])]
            member = f"member {sample_key(int(self.positions[i]))} ({self.paths[i]})"
            raise DataError(
                f"'{self._files.dataset}': {shard}: {member} is undecodable ({error}); image {i + 1} of {len(self)}"
            ) from error

    def subset(self, indices: Sequence[int] | NDArray[np.int64], relabel: Mapping[int, int] | None = None) -> Split:
        """The images at `indices`, in that order; `relabel` maps their labels to new ones."""
        chosen = np.asarray(indices, np.int64).reshape(-1)
        labels = self.labels[chosen]
        if relabel is not None:
            labels = np.array([relabel[int(label)] for label in labels], np.int64)
        columns = {name: values[chosen] for name, values in self._columns.items()}
        return Split(self._files, self.positions[chosen], columns, labels, [self.paths[i] for i in chosen])


class ShardSet:
    """A packed data set."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @property
    def name(self) -> str:
        return self.manifest.dataset

    @property
    def classnames(self) -> tuple[str, ...]:
        return self.manifest.classnames

    def labels(self, name: str) -> NDArray[np.int64]:
        """Labels [N] of a split, without touching its images."""
        return np.array(self._index(name).label, np.int64)

    def split(self, name: str) -> Split:
        """One split, every byte of it proven against the manifest.

        Raises DataUsageError when there is no such split and DataError when a shard or the index was altered.
        """
        split = self._unproven(name)
        check_hashes(self.folder, self.manifest, name)
        return split

    def _unproven(self, name: str) -> Split:
        index = self._index(name)
        files = ShardFiles(self.name, [self.folder / shard.file for shard in self.manifest.splits[name].shards])
        columns = {column: np.array(getattr(index, column), np.int64) for column in ("shard", "offset", "size")}
        labels = np.array(index.label, np.int64)
        return Split(files, np.arange(len(labels)), columns, labels, list(index.path))

    def _index(self, name: str) -> Index:
        if name not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise DataUsageError(f"'{self.name}' has no split '{name}'; it has: {known}")
        return read_index(self.folder, self.manifest, name)


def open_dataset(data_root: Path, name: str) -> ShardSet:
    """Open the packed data set in `data_root/<name>/`.

    Raises DataError when it is not packed, was packed for another version, or a shard is missing or of the wrong size.
    """
    folder = data_root / name
    manifest = read_manifest(folder, name)
    for split in manifest.splits:
        check_files(folder, manifest, split)
    return ShardSet(folder, manifest)


@dataclass(frozen=True)
class SplitReport:
    """What a full check found in one split; `readable` of `images` decode and `shards_found` of `shards` are there."""

    name: str
    images: int
    readable: int
    shards: int
    shards_found: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What a full check found in a data set; `problems` holds what concerns the whole of it."""

    dataset: str
    splits: tuple[SplitReport, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not any(split.problems for split in self.splits)


def verify(data_root: Path, name: str) -> Report:
    """Hash every shard, decode every image, compare the convention's text files; faults are reported, not raised."""
    folder = data_root / name
    try:
        manifest = read_manifest(folder, name)
    except DataError as error:
        return Report(name, (), (str(error),))
    problems = [
        f"{folder / file} differs from the manifest"
        for file, text in convention_texts(manifest).items()
        if not _holds(folder / file, text)
    ]
    return Report(name, tuple(_verify_split(folder, manifest, split) for split in manifest.splits), tuple(problems))


def _verify_split(folder: Path, manifest: Manifest, name: str) -> SplitReport:
    entry = manifest.splits[name]
    problems = [
        problem for shard in entry.shards if (problem := size_problem(folder, shard) or hash_problem(folder, shard))
    ]
    if not _holds(folder / name / "nshards.txt", f"{len(entry.shards)}\n"):
        problems.append(f"{folder / name / 'nshards.txt'} differs from the manifest")
    readable, unreadable = 0, []
    try:
        images = ShardSet(folder, manifest)._unproven(name)
        for i in range(len(images)):
            try:
                images.image(i)
                readable += 1
            except DataError as error:
                unreadable.append(str(error))
    except DataError as error:
        problems.append(str(error))
    problems += unreadable[:NAMED]
    if len(unreadable) > NAMED:
        problems.append(f"'{manifest.dataset}' {name}: {len(unreadable) - NAMED} more images are unreadable")
    found = sum((folder / shard.file).is_file() for shard in entry.shards)
    return SplitReport(name, entry.count, readable, len(entry.shards), found, tuple(problems))


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_bytes() == text.encode()
    except OSError:
        return False
