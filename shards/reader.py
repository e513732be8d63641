"""Read packed data sets: labels and paths from the index, images from the tars by offset or from start to end.

Sizes are compared with the manifest when a split is opened; SHA-256 when shards are downloaded, streamed or checked
(`procap data check`), and the digest of a single image when it is read. An image that does not decode is an error that
names it. Shapes: N images of a split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from procap.errors import UsageError, UserError
from shards.files import file_sha256, read_regular, require_regular
from shards.index import DIGEST_BYTES, DIGESTS_FILE, image_digest, read_index, read_paths, shards_digest
from shards.manifest import Manifest, Shard, SplitEntry, is_mirror, read_manifest, repack_hint
from shards.mirror import fetch_lists, fetch_shards, mirrored_url, refresh
from shards.source import sample_key
from shards.streaming import LocatedShards, make_pipeline, stream_images
from shards.urls import join

if TYPE_CHECKING:
    import webdataset
    from PIL.Image import Image

T = TypeVar("T")
LazyImage: TypeAlias = "tuple[int, Callable[[], Image]]"
"""The index of an image in a list, and a function that decodes it."""


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split of the data set in `folder`. remote: shards are streamed from the mirrored URL."""

    folder: Path
    manifest: Manifest
    split: str
    remote: bool = False

    @cached_property
    def paths(self) -> list[str]:
        """The paths of all images, read when the first is needed."""
        return read_paths(self.folder, self.manifest, self.split)

    @cached_property
    def digests(self) -> bytes:
        """DIGEST_BYTES bytes of each image, read when the first is needed; empty without those of the shards."""
        with suppress(OSError):
            content = read_regular(self.folder / self.split / DIGESTS_FILE)
            of_shards, digests = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            is_whole = len(digests) == DIGEST_BYTES * self.manifest.splits[self.split].count
            return digests if is_whole and of_shards == shards_digest(self.shards) else b""
        return b""

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.manifest.splits[self.split].shards

    def located_shards(self) -> LocatedShards:
        """List each shard with the file or URL that it is streamed from."""
        if not self.remote:
            return [(str(self.folder / shard.file), shard) for shard in self.shards]
        root = mirrored_url(self.folder.parent)
        return [(join(root, f"{self.folder.name}/{shard.file}"), shard) for shard in self.shards]

    def read(self, position: int, number: int, offset: int, size: int) -> bytes:
        """Read the image at `position`, `size` bytes at `offset` of a shard. Raises UserError if they are altered."""
        shard = self.shards[number]
        file = self.folder / shard.file
        # Mirrors have no digests: whole shards are compared, each once per process.
        if not self.digests:
            _verify_shard(self.folder, shard)
        try:
            # Opened for each read, at a position: threads share no file object, and no shard stays open.
            with require_regular(file).open("rb", buffering=0) as stream:
                data = os.pread(stream.fileno(), size, offset)
        except OSError as error:
            raise UserError(f"'{self.folder.name}': {file} cannot be read ({error.strerror})") from error
        if len(data) != size:
            missing = f"{len(data)} of {size} bytes at {offset}"
            raise UserError(f"'{self.folder.name}': {file} was cut short while in use ({missing})")
        digest = self.digests[DIGEST_BYTES * position : DIGEST_BYTES * (position + 1)]
        if digest and digest != image_digest(data):
            altered = f"{file} is altered (the digest of {self.paths[position]} differs)"
            raise UserError(f"'{self.folder.name}' {self.split}: {altered}; {repack_hint(self.folder)}")
        return data


class ImageList:
    """A list of images: their rows of the index [N], positions in the split [N], labels [N]."""

    def __init__(
        self, files: SplitFiles, rows: NDArray[np.void], positions: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        self._files = files
        self.rows, self.positions, self.labels = rows, positions, labels

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dataset(self) -> str:
        """The name of the data set."""
        return self._files.folder.name

    @property
    def identity(self) -> tuple[str, str]:
        """The digest of the packed data set, and the name of the split, in which positions are unique."""
        return self._files.manifest.digest, self._files.split

    @cached_property
    def paths(self) -> list[str]:
        """The path of each image inside its data set; raises UserError when they are not those that were packed."""
        return [self._files.paths[position] for position in self.positions.tolist()]

    def read(self, i: int) -> bytes:
        """Read the encoded bytes of image `i`, of a remote split with its whole shard."""
        if self._files.remote:
            return next(self.stream([i]))
        row = self.rows[i]
        return self._files.read(int(self.positions[i]), int(row["shard"]), int(row["offset"]), int(row["size"]))

    def stream(self, order: Sequence[int]) -> Generator[bytes]:
        """Yield the encoded bytes of the images `order`, each at most once, from shards that are read as a whole."""
        return stream_images(self._files.located_shards(), self.rows, self.positions, order)

    def lazy_images(self, order: Iterable[int]) -> Generator[LazyImage]:
        """Yield each index of `order` with a function that decodes its image; a remote split is read as `stream`."""
        if not self._files.remote:
            yield from ((i, partial(self.image, i)) for i in order)
            return
        indices = [*order]
        with closing(self.stream(indices)) as encoded:
            for i, data in zip(indices, encoded, strict=True):
                yield i, partial(self.decode, i, data)

    def image(self, i: int) -> Image:
        """Read and decode image `i` to RGB; raises UserError naming shard, member and path if it is undecodable."""
        return self.decode(i, self.read(i))

    def decode(self, i: int, data: bytes) -> Image:
        """Decode the bytes of image `i`; raises as `image` does."""
        # Imported here: most commands read lists alone, without Pillow and simplejpeg.
        from shards.images import decode

        return self._decode(decode, i, data)

    def decode_pixels(self, i: int, data: bytes) -> NDArray[np.uint8]:
        """Decode the bytes of image `i` to pixels [H, W, 3]; raises as `image` does."""
        from shards.images import decode_pixels

        return self._decode(decode_pixels, i, data)

    def _decode(self, decoder: Callable[..., T], i: int, data: bytes) -> T:
        from shards.images import ImageError

        try:
            return decoder(data, upright=self._files.manifest.upright)
        except ImageError as error:
            files, position = self._files, int(self.positions[i])
            shard = files.folder / files.shards[int(self.rows[i]["shard"])].file
            member = f"member {sample_key(position)} ({files.paths[position]})"
            number = f"image {position + 1} of {len(files.paths)}"
            raise UserError(f"'{files.folder.name}': {shard}: {member} is undecodable ({error}); {number}") from error

    def subset(self, indices: Sequence[int] | NDArray[np.int64], relabel: Mapping[int, int] | None = None) -> ImageList:
        """Select the images at `indices`, in that order; `relabel` maps their labels to new ones."""
        # With a type, because an empty list would become floats, which select nothing.
        chosen = np.asarray(indices, np.int64).reshape(-1)
        labels = self.labels[chosen]
        if relabel is not None:
            labels = np.array([relabel[int(label)] for label in labels], np.int64)
        return ImageList(self._files, self.rows[chosen], self.positions[chosen], labels)


class PackedDataset:
    """A packed data set. remote: what is read from start to end comes from the URL of a mirror and is not stored."""

    def __init__(self, folder: Path, manifest: Manifest, *, remote: bool = False) -> None:
        self.folder, self.manifest = folder, manifest
        self.remote = remote and is_mirror(folder.parent)
        self._indices: dict[str, NDArray[np.void]] = {}

    @property
    def name(self) -> str:
        return self.manifest.dataset

    @property
    def classnames(self) -> tuple[str, ...]:
        return self.manifest.classnames

    def labels(self, split: str) -> NDArray[np.int64]:
        """Return the labels [N] of a split, without reading its images."""
        return self._index(split)["label"].astype(np.int64)

    def list_images(self, split: str, *, remote: bool = False) -> ImageList:
        """List the images of a split without looking for its shards; `open_images` makes sure that they can be read."""
        rows = self._index(split)
        files = SplitFiles(self.folder, self.manifest, split, remote)
        return ImageList(files, rows, np.arange(len(rows)), rows["label"].astype(np.int64))

    def open_images(self, split: str, *, sequential: bool = False) -> ImageList:
        """List the images of a split whose shards have the manifest's sizes; those of a mirror are downloaded first.

        sequential: with `remote`, images come from the URL by `ImageList.stream` or `lazy_images`, and are not stored.
        """
        images = self.list_images(split, remote=sequential and self.remote)
        if not (sequential and self.remote):
            fetch_shards(self.folder, self.manifest.splits[split])
            self.check_sizes(split)
        return images

    def pipeline(self, split: str) -> webdataset.WebDataset:
        """Make a webdataset pipeline over the shards of a split, dealt to processes and workers."""
        return make_pipeline(self.open_images(split, sequential=True)._files.located_shards(), distribute=True)

    def check_sizes(self, split: str) -> None:
        """Raise UserError for a shard that is missing or has another size; those of a mirror are fetched later."""
        shards = () if is_mirror(self.folder.parent) else self._entry(split).shards
        for problem in (shard_problem(self.folder, shard) for shard in shards):
            if problem:
                raise UserError(f"'{self.name}' {split}: {problem}; {repack_hint(self.folder)}")

    def _entry(self, split: str) -> SplitEntry:
        if split not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise UsageError(f"'{self.name}' has no split '{split}'; it has: {known}")
        return self.manifest.splits[split]

    def _index(self, split: str) -> NDArray[np.void]:
        if split not in self._indices:
            fetch_lists(self.folder, split, self._entry(split))
            self._indices[split] = read_index(self.folder, self.manifest, split)
        return self._indices[split]


def shard_problem(folder: Path, shard: Shard, *, hashed: bool = False) -> str:
    """Describe a shard that is missing, no regular file or has a different size; hashed: or different bytes."""
    file, images = folder / shard.file, f"{shard.count} images"
    try:
        size = require_regular(file).stat().st_size
        if size != shard.size:
            verdict = "truncated" if size < shard.size else "altered"
            return f"{file} is {verdict} ({size} of {shard.size} bytes, {images})"
        if hashed and file_sha256(file) != shard.sha256:
            return f"{file} is altered (SHA-256 differs from the manifest; {images})"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror}; {images})"
    return ""


@cache
def _verify_shard(folder: Path, shard: Shard) -> None:
    """Raise UserError for a shard whose SHA-256 is not that of the manifest."""
    if problem := shard_problem(folder, shard, hashed=True):
        raise UserError(f"'{folder.name}': {problem}; {repack_hint(folder)}")


def open_dataset(data_root: Path, name: str, *, remote: bool = False) -> PackedDataset:
    """Open `data_root/<name>/`, updated if it is a mirror; only splits that are read need to be there."""
    folder = refresh(data_root, name)
    return PackedDataset(folder, read_manifest(folder), remote=remote)
