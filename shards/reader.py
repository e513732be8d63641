"""Read packed data sets by position: labels and paths from the index, images from the tars by offset.

Nothing that differs from the manifest is ever read silently: a shard that is missing, cut short or altered is refused
by name when its split is opened, an image that does not decode when it is read. Shapes: N images of a split.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from procap.errors import UsageError, UserError
from shards.files import open_regular
from shards.manifest import Manifest, read_manifest
from shards.manifest_checks import check_files, check_split, read_index, read_paths
from shards.mirror import is_mirror, mirrored_url, open_shard, refresh
from shards.streaming import Locations, make_pipeline, stream_images
from shards.tar import sample_key
from shards.urls import join

if TYPE_CHECKING:
    import webdataset
    from PIL.Image import Image


# A process may usually have 1,024 files open; ImageNet alone has more shards than that.
MAX_OPEN = 128


class _OpenFile:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class SplitFiles:
    """The files of one split of the data set `folder`; safe to share with other processes and with threads.

    There is no lock that a fork could leave locked: single operations on a dict are atomic, and a thread that still
    reads from a file that another one removes keeps it open by holding it.
    fetch: if the data root is a mirror, download a shard when it is first read.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str, *, fetch: bool) -> None:
        self.folder, self.manifest, self.split = folder, manifest, split
        self.shards = manifest.splits[split].shards
        self.fetch = fetch and is_mirror(folder.parent)
        self._open: dict[int, _OpenFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Another process reads the paths if it needs one.
        return {name: value for name, value in vars(self).items() if name != "paths"} | {"_open": {}}

    @cached_property
    def paths(self) -> list[bytes]:
        """The paths of all images, read when the first is needed."""
        return read_paths(self.folder, self.manifest, self.split).split(b"\n")[:-1]

    def path(self, number: int) -> Path:
        return self.folder / self.shards[number].file

    def locations(self) -> Locations:
        """List each shard with its URL, or its file if the data root is no mirror."""
        if not is_mirror(self.folder.parent):
            return [(str(self.folder / shard.file), shard) for shard in self.shards]
        root = mirrored_url(self.folder.parent)
        return [(join(root, f"{self.folder.name}/{shard.file}"), shard) for shard in self.shards]

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset` of a shard; raises UserError when they are not there."""
        try:
            file = self._open.get(number) or self._open_file(number)
            data = os.pread(file.descriptor, size, offset)
        except OSError as error:
            raise UserError(f"'{self.folder.name}': {self.path(number)} cannot be read ({error.strerror})") from error
        if len(data) != size:
            found = f"{len(data)} of {size} bytes at {offset}"
            raise UserError(f"'{self.folder.name}': {self.path(number)} was cut short while in use ({found})")
        return data

    def _open_file(self, number: int) -> _OpenFile:
        shard = self.shards[number]
        descriptor = open_shard(self.folder, shard) if self.fetch else open_regular(self.folder, shard.file)
        file = self._open.setdefault(number, _OpenFile(descriptor))
        for oldest in list(self._open)[:-MAX_OPEN]:
            self._open.pop(oldest, None)
        return file


class Split:
    """A list of images, all of a split or a selection: their rows of the index [N], positions in the split [N], labels.

    Paths are read from the disk when the first is needed. is_streamed: images are read by `stream`, shard by shard,
    instead of by position.
    """

    def __init__(
        self,
        files: SplitFiles,
        rows: NDArray[np.void],
        positions: NDArray[np.int64],
        labels: NDArray[np.int64],
        is_streamed: bool = False,
    ) -> None:
        self._files = files
        self.rows, self.positions, self.labels = rows, positions, labels
        self.is_streamed = is_streamed

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def paths(self) -> list[str]:
        """The path of each image inside its data set; raises UserError when they are not those that were packed."""
        every = self._files.paths
        return [every[position].decode() for position in self.positions.tolist()]

    def read(self, i: int) -> bytes:
        """Read the encoded bytes of image `i`."""
        row = self.rows[i]
        return self._files.read(int(row["shard"]), int(row["offset"]), int(row["size"]))

    def stream(self, order: Sequence[int]) -> Generator[bytes, None, None]:
        """Yield the encoded bytes of the images `order`, each at most once, shard by shard without a local copy."""
        return stream_images(self._files.locations(), self.rows, self.positions, order)

    def image(self, i: int) -> Image:
        """Read and decode image `i` to RGB; raises UserError naming shard, member and path if it is undecodable."""
        return self.decode(i, self.read(i))

    def decode(self, i: int, data: bytes) -> Image:
        """Decode the bytes of image `i`; raises as `image` does."""
        from shards.images import ImageError, decode

        try:
            return decode(data)
        except ImageError as error:
            position = int(self.positions[i])
            shard = self._files.path(int(self.rows[i]["shard"]))
            member = f"member {sample_key(position)} ({self._files.paths[position].decode()})"
            place = f"image {position + 1} of {len(self._files.paths)}"
            raise UserError(
                f"'{self._files.folder.name}': {shard}: {member} is undecodable ({error}); {place}"
            ) from error

    def subset(self, indices: Sequence[int] | NDArray[np.int64], relabel: Mapping[int, int] | None = None) -> Split:
        """Select the images at `indices`, in that order; `relabel` maps their labels to new ones."""
        chosen = np.asarray(indices, np.int64).reshape(-1)
        labels = self.labels[chosen]
        if relabel is not None:
            labels = np.array([relabel[int(label)] for label in labels], np.int64)
        return Split(self._files, self.rows[chosen], self.positions[chosen], labels, self.is_streamed)


class ShardSet:
    """A packed data set. stream: its images are read shard by shard, from a URL without a local copy."""

    def __init__(self, folder: Path, manifest: Manifest, *, stream: bool = False) -> None:
        self.folder = folder
        self.manifest = manifest
        self.stream = stream
        self._indices: dict[str, NDArray[np.void]] = {}

    @property
    def name(self) -> str:
        return self.manifest.dataset

    @property
    def classnames(self) -> tuple[str, ...]:
        return self.manifest.classnames

    def labels(self, name: str) -> NDArray[np.int64]:
        """Return the labels [N] of a split, without reading its images."""
        return self._index(name)["label"].astype(np.int64)

    def paths(self, name: str) -> list[str]:
        """Return the paths of a split in list order, without reading its images."""
        return self.open_unverified(name).paths

    def split(self, name: str) -> Split:
        """Open one split and verify it against the manifest byte for byte."""
        self.check_sizes(name)
        split = self.open_unverified(name, fetch=True)
        check_split(self.folder, self.manifest, name, split.labels, hash_shards=not self.stream)
        return split

    def pipeline(self, name: str) -> webdataset.WebDataset:
        """Make a webdataset pipeline over the shards of a split, dealt to processes and workers."""
        return make_pipeline(self.split(name)._files.locations(), deal=True)

    def open_unverified(self, name: str, fetch: bool = False) -> Split:
        """Open one split without verifying its shards' bytes. fetch: get a shard of a mirror when it is first read."""
        rows = self._index(name)
        files = SplitFiles(self.folder, self.manifest, name, fetch=fetch)
        return Split(files, rows, np.arange(len(rows)), rows["label"].astype(np.int64), self.stream)

    def check_sizes(self, name: str) -> None:
        """Check names and sizes of a split's shards, which costs little; raises as `split` does."""
        self._named(name)
        check_files(self.folder, self.manifest, name)

    def _named(self, name: str) -> None:
        if name not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise UsageError(f"'{self.name}' has no split '{name}'; it has: {known}")

    def _index(self, name: str) -> NDArray[np.void]:
        self._named(name)
        if name not in self._indices:
            self._indices[name] = read_index(self.folder, self.manifest, name)
        return self._indices[name]


def open_dataset(data_root: Path, name: str, *, whole: bool = False, stream: bool = False) -> ShardSet:
    """Open the packed data set in `data_root/<name>/`; only splits that are read need to be present.

    whole: every split must be present. stream: see `ShardSet`.
    """
    folder = data_root / name
    # Does nothing unless the data root mirrors a URL.
    refresh(data_root, name)
    manifest = read_manifest(folder, name)
    for split in manifest.splits if whole else ():
        check_files(folder, manifest, split)
    return ShardSet(folder, manifest, stream=stream)
