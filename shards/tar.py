"""WebDataset tars: the members that packing writes for an image, and an index of a tar from its headers.

Members of a sample lie side by side in alphabetical order and share their name up to the first dot: `s0000008.cls`
(label), `s0000008.json` (path), `s0000008.png` (image). A tar is untrusted: names group and type its members and are
never used as paths, and nothing that could run is ever decoded. Shapes: N samples of a tar.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

# Extensions that WebDataset readers treat as images. Others can be dangerous: a library that decodes members by
# extension would unpickle a `pyd`.
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")

# Largest JSON member with a path, in bytes; largest image, in bytes.
SIDE_LIMIT = 2**16
IMAGE_LIMIT = 2**32 - 1


# Extensions of images in shards that others published.
FOREIGN_IMAGES = (*IMAGES, "jpeg")
LABELS = ("cls", "cls.txt")
# Members that readers would unpickle.
PICKLED = frozenset(("pyd", "pickle", "pkl", "pth", "pt"))

# Largest header or side member, in bytes; a larger one is refused before it is read.
HEADER_LIMIT = 2**20
METADATA = re.compile(r"__[^/]*__(\.|/|$)")
NAMED = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)


def sample_key(position: int) -> str:
    """Return the member name of the image at `position` of its split."""
    return f"s{position:07d}"


def tar_sample(key: str, path: str, label: int, data: bytes, extension: str) -> dict[str, str | bytes]:
    """Make the sample that webdataset's TarWriter writes for an image. Raises ValueError if it cannot be stored."""
    if extension not in IMAGES:
        raise ValueError(f"its name does not end as an image's does ({', '.join(IMAGES)})")
    if "\n" in path:
        raise ValueError("its name holds a line break")
    if len(data) > IMAGE_LIMIT:
        raise ValueError("it is larger than 4 GiB")
    try:
        side = json.dumps({"path": path}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("its name is not UTF-8") from None
    if len(side) > SIDE_LIMIT:
        raise ValueError("its name is too long")
    return {"__key__": key, "cls": str(label).encode(), "json": side, extension: data}


@dataclass(frozen=True, eq=False)
class TarIndex:
    """The samples of one tar: offset, size, label and path of each image, all [N].

    keys: the shared name of the members. paths: what the data set calls the image.
    """

    file: Path
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    keys: NDArray[np.bytes_] = field(repr=False)
    paths: NDArray[np.bytes_] = field(repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, stop: int) -> TarIndex:
        offsets, sizes, labels = (column[start:stop] for column in (self.offsets, self.sizes, self.labels))
        return TarIndex(self.file, offsets, sizes, labels, self.keys[start:stop], self.paths[start:stop])


class TarProblem(ValueError):
    """A fault of a tar, in words that follow its name in a message."""


@dataclass
class _Sample:
    key: str
    image: tuple[str, int, int] | None = None
    label: int | None = None
    side: tarfile.TarInfo | None = None
    extensions: set[str] = field(default_factory=set)


def image_offset(sample: Mapping[str, str | bytes], extension: str, start: int) -> int:
    """Compute the offset of the image of a `tar_sample` in a tar in which the sample begins at byte `start`."""
    for name in sorted(sample.keys() - {"__key__"}):
        start += tarfile.BLOCKSIZE
        if name == extension:
            break
        start += -(-len(sample[name]) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return start


def scan_tar(file: Path, split: str, *, read_paths: bool = True) -> TarIndex:
    """Walk through the headers of a tar, reading labels but no image.

    read_paths: take the path that a sample's json member gives, as in shards that this program packed; else, and where
    there is none, an image is called `<split>/<key>.<ext>`. Directories, hidden names, names without a dot and
    `__names__` are no samples; all else must belong to a whole one. Raises TarProblem when the file is no such tar or
    a sample is not whole.
    """
    rows: list[tuple[int, int, int, bytes, bytes]] = []
    try:
        with file.open("rb") as stream:
            for sample in _samples(stream):
                rows.append(_row(stream, sample, split, read_paths))
    except (tarfile.TarError, OSError, EOFError, RecursionError, OverflowError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise TarProblem(f"is not a readable uncompressed tar ({reason})") from error
    offsets, sizes, labels, keys, paths = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    places, lengths, classes = (np.array(column, np.int64) for column in (offsets, sizes, labels))
    return TarIndex(file, places, lengths, classes, np.array(keys, np.bytes_), np.array(paths, np.bytes_))


def _samples(stream: BinaryIO) -> Iterator[_Sample]:
    sample = None
    for member in _members(stream):
        name = NAMED.fullmatch(member.name)
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise TarProblem(f"has {member.name!r:.200}, which is no plain file")
        if name is None or METADATA.match(member.name):
            continue
        key, extension = name["key"].removeprefix("./"), name["extension"].lower()
        if sample is None or sample.key != key:
            if sample:
                yield sample
            sample = _Sample(_safe(key, member))
        _add(stream, sample, member, extension)
    if sample:
        yield sample


def _add(stream: BinaryIO, sample: _Sample, member: tarfile.TarInfo, extension: str) -> None:
    if extension in sample.extensions:
        raise TarProblem(f"has {member.name!r} twice")
    if PICKLED & set(extension.split(".")):
        raise TarProblem(f"has {member.name!r}: pickled data can run commands and are not read")
    sample.extensions.add(extension)
    if extension in FOREIGN_IMAGES:
        if sample.image:
            raise TarProblem(f"has two images of sample {sample.key!r}")
        sample.image = extension, member.offset_data, member.size
    elif extension in LABELS:
        sample.label = _agreed(sample, _number(_content(stream, member), member))
    elif extension == "json":
        sample.side = member


def _row(stream: BinaryIO, sample: _Sample, split: str, read_paths: bool) -> tuple[int, int, int, bytes, bytes]:
    if sample.image is None:
        has = ", ".join(sorted(sample.extensions))
        raise TarProblem(
            f"has sample {sample.key!r} without an image (only {has}): its members may not be side by side"
        )
    extension, offset, size = sample.image
    path = f"{split}/{sample.key}.{extension}"
    if sample.side and read_paths:
        side = _side(stream, sample.side)
        # Beside a cls member a json member may say something else by "label", such as the class's name.
        if "label" in side and (sample.label is None or isinstance(side["label"], int)):
            sample.label = _agreed(sample, side["label"])
        path = _own_path(side.get("path"), sample.side) or path
    if sample.label is None:
        has = ", ".join(sorted(sample.extensions))
        raise TarProblem(f"has sample {sample.key!r} without a label (only {has}; a cls or json member has it)")
    return offset, size, sample.label, sample.key.encode(), path.encode()


def _agreed(sample: _Sample, label: object) -> int:
    if not isinstance(label, int) or isinstance(label, bool) or not -1 < label < 2**31:
        raise TarProblem(f"has sample {sample.key!r} with the label {label!r:.40}, which is no whole number from 0")
    if sample.label not in (None, label):
        raise TarProblem(f"has sample {sample.key!r} with two labels, {sample.label} and {label}")
    return label


def _number(content: bytes, member: tarfile.TarInfo) -> int:
    digits = content.strip()
    if not digits.isdigit() or len(digits) > 9:
        raise TarProblem(f"has {member.name!r} with the label {content[:20]!r}, which is no whole number from 0")
    return int(digits)


def _side(stream: BinaryIO, member: tarfile.TarInfo) -> dict[str, object]:
    try:
        content = json.loads(_content(stream, member))
    except (ValueError, RecursionError):
        raise TarProblem(f"has {member.name!r}, which is no JSON") from None
    return content if isinstance(content, dict) else {}


def _own_path(path: object, member: tarfile.TarInfo) -> str | None:
    """Return the path that a json member gives, if it can name an image."""
    if not isinstance(path, str) or path.rpartition(".")[2].lower() not in FOREIGN_IMAGES:
        return None
    return _safe(path, member)


def _safe(name: str, member: tarfile.TarInfo) -> str:
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or not name.isprintable() or len(name) > 1000:
        raise TarProblem(f"has {member.name!r:.200}, whose name is no plain name inside a data set")
    return name


def _members(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members in order, check that each lies inside the file, and that the archive is complete."""
    end = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    with tarfile.open(fileobj=cast(BinaryIO, _Headers(stream)), mode="r:") as tar:
        place = -1
        while (member := tar.next()) is not None:
            # Kept members would take more memory than all labels and offsets of a large set.
            cast(Any, tar).members.clear()
            if member.size < 0 or member.offset_data <= place or member.offset_data + member.size > end:
                raise TarProblem(f"was cut short or is damaged at {member.name!r:.200}")
            place = member.offset_data
            yield member
        _refuse_unended(stream, tar.offset)


def _refuse_unended(stream: BinaryIO, place: int) -> None:
    # tarfile stops silently at anything that is not a header; only blocks of zeros prove that nothing is missing.
    stream.seek(place)
    block = stream.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise TarProblem("was cut short: it lacks the mark at its end")
    while block:
        if block.strip(b"\0"):
            raise TarProblem(f"is damaged or holds more than one archive: no member begins at byte {place}")
        block = stream.read(HEADER_LIMIT)


def _content(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    if member.size > HEADER_LIMIT:
        raise TarProblem(f"has {member.name!r} of {member.size} bytes, too many for a label or a path")
    stream.seek(member.offset_data)
    return stream.read(member.size)


class _Headers:
    """A file that limits the size of reads, because tarfile allocates whatever size a forged header claims."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._place = stream, 0

    def read(self, size: int) -> bytes:
        if size > HEADER_LIMIT:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        # Labels are read from the same file in between.
        self._stream.seek(self._place)
        data = self._stream.read(size)
        self._place += len(data)
        return data

    def seek(self, place: int) -> int:
        self._place = place
        return place

    def tell(self) -> int:
        return self._place
