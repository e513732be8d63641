"""WebDataset shards as tar files: written by webdataset so that equal samples give equal bytes, and indexed again.

Members of a sample lie side by side, in alphabetical order, as the clip-benchmark convention has them:
`s0000008.cls` (label), `s0000008.json` (path), `s0000008.png` (image).
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Extensions that readers of the convention take for an image. Others may mean something else to them: a library that
# decodes members by extension would unpickle a `pyd`.
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")

BLOCK = tarfile.BLOCKSIZE
# A label or a path; a member that claims to be more is not one.
SIDE_LIMIT = 2**16
IMAGE_LIMIT = 2**32 - 1


@dataclass(frozen=True)
class Sample:
    """One sample of a tar: where its image's bytes lie, and what its side members say."""

    offset: int
    size: int
    label: int
    path: str


def sample_key(position: int) -> str:
    """The member name of the image at `position` of its split."""
    return f"s{position:07d}"


def tar_sample(key: str, path: str, label: int, data: bytes, extension: str) -> dict[str, str | bytes]:
    """What webdataset's TarWriter writes of one image. Raises ValueError when it cannot be stored, with the reason."""
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


def read_samples(file: Path) -> Iterator[Sample]:
    """The samples of one shard in order.

    Names of members group and type them and are never used as paths. Everything but plain files is refused, extended
    headers too, and no more is read of a member than the file has.
    Raises tarfile.TarError, OSError or ValueError when the file is not such a shard.
    """
    with file.open("rb") as stream:
        parts: dict[str, tarfile.TarInfo] = {}
        for member in _members(stream, file.stat().st_size):
            key, _, extension = member.name.partition(".")
            if parts and next(iter(parts.values())).name.partition(".")[0] != key:
                raise ValueError(f"members of {member.name!r} are not side by side")
            if extension in parts:
                raise ValueError(f"{member.name!r} is there twice")
            parts[extension] = member
            if len(parts) == 3:
                yield _sample(stream, parts)
                parts = {}
        if parts:
            raise ValueError(f"the last sample lacks members (has {', '.join(sorted(parts))})")


def _sample(stream: BinaryIO, parts: dict[str, tarfile.TarInfo]) -> Sample:
    images = set(parts) - {"cls", "json"}
    if len(images) != 1 or not images <= set(IMAGES):
        raise ValueError(f"a sample has the members {', '.join(sorted(parts))}")
    image = parts[images.pop()]
    try:
        side = json.loads(_content(stream, parts["json"]))
    except RecursionError:
        side = None
    if not isinstance(side, dict) or not isinstance(side.get("path"), str):
        raise ValueError(f"{parts['json'].name!r} holds no path")
    return Sample(image.offset_data, image.size, int(_content(stream, parts["cls"])), side["path"])


def _members(stream: BinaryIO, end: int) -> Iterator[tarfile.TarInfo]:
    # Python's reader follows extended headers and allocates what they claim; plain headers are all that is written.
    place = 0
    while True:
        stream.seek(place)
        block = stream.read(BLOCK)
        if block == bytes(BLOCK):
            return
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        member.offset_data = place + BLOCK
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ValueError(f"member {member.name!r} is not a plain file")
        if member.size < 0 or member.offset_data + member.size > end:
            raise ValueError(f"member {member.name!r} reaches beyond the end of the file")
        yield member
        place = member.offset_data + member.size + -member.size % BLOCK


def _content(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    if member.size > SIDE_LIMIT:
        raise ValueError(f"member {member.name!r} is too large ({member.size} bytes)")
    stream.seek(member.offset_data)
    return stream.read(member.size)


def file_sha256(file: Path) -> str:
    """SHA-256 of a whole file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
