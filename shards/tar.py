"""WebDataset tars: the members that packing writes for an image, and an index of a tar from its headers.

Members of a sample lie side by side in alphabetical order and share their name up to the first dot: `s0000008.cls`
(label), `s0000008.json` (path), `s0000008.png` (image). A tar is untrusted: names group and type its members and are
never used as paths, and nothing that could run is ever decoded. Shapes: N samples of a tar.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shards.files import require_regular
from shards.names import unsafe_path

# Extensions that WebDataset readers treat as images. Others can be dangerous: a library that decodes members by
# extension would unpickle a `pyd`.
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")

# Largest image, in bytes.
IMAGE_LIMIT = 2**32 - 1
# Extensions of images in shards that others published.
FOREIGN_IMAGES = (*IMAGES, "jpeg")
LABELS = ("cls", "cls.txt")
# Members that readers would unpickle.
PICKLED = frozenset(("pyd", "pickle", "pkl", "pth", "pt"))

# Largest header or side member, in bytes; a larger one is refused before it is read.
HEADER_LIMIT = 2**20
METADATA = re.compile(r"__[^/]*__(\.|/|$)")
MEMBER_NAME = re.compile(r"(?P<key>(?:.*/)?[^./][^./]*)\.(?P<extension>[^/]+)", re.DOTALL)


SAMPLE_KEY = re.compile(r"s[0-9]{7,18}")


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
    if len(side) > HEADER_LIMIT:
        raise ValueError("its name is too long")
    return {"__key__": key, "cls": str(label).encode(), "json": side, extension: data}


@dataclass(frozen=True, eq=False)
class TarIndex:
    """The samples of one tar: rows [N] of offset, size and label of the image, shared member name (key) and path."""

    file: Path
    rows: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int) -> TarIndex:
        return TarIndex(self.file, self.rows[start:stop])


class TarProblem(ValueError):
    """A fault of a tar, in words that follow its name in a message."""


def image_offset(sample: Mapping[str, str | bytes], extension: str, start: int) -> int:
    """Compute the offset of the image of a `tar_sample` in a tar in which the sample begins at byte `start`."""
    for name in sorted(sample.keys() - {"__key__"}):
        start += tarfile.BLOCKSIZE
        if name == extension:
            break
        start += -(-len(sample[name]) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return start


def scan_tar(file: Path, split: str) -> TarIndex:
    """Walk through the headers of a tar, reading labels and paths but no image.

    The path of an image is the one that its sample's json member gives, as in shards that this program packed, else
    `<split>/<key>.<ext>`. Directories, hidden names, names without a dot and `__names__` are no samples; all else must
    belong to a whole one. Raises TarProblem when the file is no such tar, a sample is not whole, or a name leads out.
    """
    try:
        require_regular(file)
        with _TarFile(io.FileIO(file)) as stream:
            samples = groupby(_find_members(stream), key=lambda member: member[0])
            rows = [_read_sample(stream, key, members, split) for key, members in samples]
    except (tarfile.TarError, OSError, EOFError, RecursionError, OverflowError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise TarProblem(f"is not a readable uncompressed tar ({reason})") from error
    key, path = max((len(row[3]) for row in rows), default=1), max((len(row[4]) for row in rows), default=1)
    kinds = [("offset", "i8"), ("size", "i8"), ("label", "i8"), ("key", f"S{key}"), ("path", f"S{path}")]
    return TarIndex(file, np.array(rows, kinds))


class _TarFile(io.BufferedReader):
    """A file that limits the size of reads, because tarfile allocates whatever size a forged header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return super().read(size)


def _find_members(stream: _TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key and extension of the members of samples; check that each member is a whole file of the archive."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        end = -1
        while (member := tar.next()) is not None:
            # The list of members would take more memory than all labels and offsets of a large set.
            cast(Any, tar).members.clear()
            if member.size < 0 or member.offset_data <= end or member.offset_data + member.size > size:
                raise TarProblem(f"was cut short or is damaged at {member.name!r:.200}")
            end = member.offset_data
            if not member.isdir() and (not member.isreg() or member.issparse()):
                raise TarProblem(f"has {member.name!r:.200}, which is no plain file")
            name = member.name.removeprefix("./")
            if name != ".":
                _check_name(name, member)
            parts = MEMBER_NAME.fullmatch(name)
            if parts and not member.isdir() and not METADATA.match(name):
                yield parts["key"], parts["extension"].lower(), member
        # tarfile stops silently at anything that is not a header; only blocks of zeros prove that nothing is missing.
        stream.seek(tar.offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise TarProblem("was cut short: it lacks the mark at its end")
        while block:
            if block.strip(b"\0"):
                raise TarProblem(f"is damaged or holds more than one archive: no member begins at byte {tar.offset}")
            block = stream.read(HEADER_LIMIT)


def _read_sample(
    stream: _TarFile, key: str, members: Iterable[tuple[str, str, tarfile.TarInfo]], split: str
) -> tuple[int, int, int, bytes, bytes]:
    """Read offset, size and label of the image of a sample, its key and its path."""
    found: dict[str, tarfile.TarInfo] = {}
    for _, extension, member in members:
        if extension in found:
            raise TarProblem(f"has {member.name!r} twice")
        if PICKLED & set(extension.split(".")):
            raise TarProblem(f"has {member.name!r}: pickled data can run commands and are not read")
        found[extension] = member
    names, has = [name for name in found if name in FOREIGN_IMAGES], ", ".join(sorted(found))
    if not names:
        raise TarProblem(f"has sample {key!r} without an image (only {has}): its members may not be side by side")
    if len(names) > 1:
        raise TarProblem(f"has two images of sample {key!r}")
    image, path = found[names[0]], f"{split}/{key}.{names[0]}"
    labels: list[object] = []
    for member in (found[name] for name in LABELS if name in found):
        digits = _read_member(stream, member).strip()
        if not digits.isdigit() or len(digits) > 9:
            raise TarProblem(f"has {member.name!r} with the label {digits[:20]!r}, which is no whole number from 0")
        labels.append(int(digits))
    if "json" in found:
        side = _read_json(stream, found["json"])
        # Beside a cls member a json member may say something else by "label", such as the class's name.
        if "label" in side and (not labels or isinstance(side["label"], int)):
            labels.append(side["label"])
        own = side.get("path")
        if isinstance(own, str) and own.rpartition(".")[2].lower() in FOREIGN_IMAGES:
            path = _check_name(own, found["json"])
    if not labels:
        raise TarProblem(f"has sample {key!r} without a label (only {has}; a cls or json member has it)")
    for label in labels:
        if not isinstance(label, int) or isinstance(label, bool) or not -1 < label < 2**31:
            raise TarProblem(f"has sample {key!r} with the label {label!r:.40}, which is no whole number from 0")
        if label != labels[0]:
            raise TarProblem(f"has sample {key!r} with two labels, {labels[0]} and {label}")
    return image.offset_data, image.size, cast(int, labels[0]), key.encode(), path.encode()


def _read_json(stream: _TarFile, member: tarfile.TarInfo) -> dict[str, object]:
    try:
        content = json.loads(_read_member(stream, member))
    except (ValueError, RecursionError):
        raise TarProblem(f"has {member.name!r}, which is no JSON") from None
    return content if isinstance(content, dict) else {}


def _read_member(stream: _TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > HEADER_LIMIT:
        raise TarProblem(f"has {member.name!r} of {member.size} bytes, too many for a label or a path")
    stream.seek(member.offset_data)
    return stream.read(member.size)


def _check_name(name: str, member: tarfile.TarInfo) -> str:
    """Return `name` if it is a plain relative path."""
    if unsafe_path(name) or len(name) > 1000:
        raise TarProblem(f"has {member.name!r:.200}, whose name is no plain name inside a data set")
    return name
