"""WebDataset shards as tar files: written so that equal samples give equal bytes, and indexed for random access.

Members of a sample lie side by side, in alphabetical order, as the clip-benchmark convention has them:
`s0000008.cls` (label), `s0000008.json` (path), `s0000008.png` (image).
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shards.manifest import Shard
from shards.records import Record


class Index(BaseModel):
    """Where each image of a split lies, in list order; one column per fact, all of the split's length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    label: tuple[int, ...]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One sample as read back from a tar: where its image's bytes lie, and what its side members say."""

    offset: int
    size: int
    label: int
    path: str


def sample_key(position: int) -> str:
    """The member name of the image at `position` of its split."""
    return f"s{position:07d}"


def write_shards(records: Iterable[Record], folder: Path, per_shard: int) -> tuple[list[Shard], Index]:
    """Write `0.tar, 1.tar, ...` and `nshards.txt` of one split into `folder` and read them back into an index.

    Raises ValueError for a path without an extension and OSError when the disk refuses.
    """
    folder.mkdir(parents=True)
    stream, position = iter(records), 0
    shards: list[Shard] = []
    columns: dict[str, list[int] | list[str]] = {name: [] for name in Index.model_fields}
    while batch := list(islice(stream, per_shard)):
        file = folder / f"{len(shards)}.tar"
        with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
            for record in batch:
                _add_sample(tar, sample_key(position), record)
                position += 1
        for sample in read_samples(file):
            row = (len(shards), sample.offset, sample.size, sample.label, sample.path)
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)  # type: ignore[arg-type]
        name = f"{folder.name}/{file.name}"
        shards.append(Shard(file=name, sha256=file_sha256(file), size=file.stat().st_size, count=len(batch)))
    (folder / "nshards.txt").write_text(f"{len(shards)}\n")
    return shards, Index.model_validate(columns)


def _add_sample(tar: tarfile.TarFile, key: str, record: Record) -> None:
    if record.extension in ("cls", "json", "") or "/" in record.extension:
        raise ValueError(f"{record.path!r} has no image extension")
    side = json.dumps({"path": record.path}, ensure_ascii=False)
    members = {"cls": str(record.label).encode(), "json": side.encode(), record.extension: record.data}
    for extension, data in sorted(members.items()):
        # Time, owner and mode are constants: a second packing gives the same bytes.
        member = tarfile.TarInfo(f"{key}.{extension}")
        member.size, member.mtime, member.mode = len(data), 0, 0o444
        member.uname = member.gname = "bigdata"
        tar.addfile(member, io.BytesIO(data))


def read_samples(file: Path) -> Iterator[Sample]:
    """The samples of one shard in order.

    Names of members group and type them and are never used as paths.
    Raises tarfile.TarError, OSError or ValueError when the file is not such a shard.
    """
    with tarfile.open(file, "r:") as tar:
        parts: dict[str, tarfile.TarInfo] = {}
        for member in tar:
            parts[member.name.partition(".")[2]] = member
            if len(parts) < 3:
                continue
            key = member.name.partition(".")[0]
            if {part.name.partition(".")[0] for part in parts.values()} != {key} or not {"cls", "json"} < set(parts):
                raise ValueError(f"members of {member.name!r} are not side by side")
            image = next(part for extension, part in parts.items() if extension not in ("cls", "json"))
            side = json.loads(_content(tar, parts["json"]))
            yield Sample(image.offset_data, image.size, int(_content(tar, parts["cls"])), str(side["path"]))
            parts = {}
        if parts:
            raise ValueError(f"the last sample lacks members (has {', '.join(sorted(parts))})")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    if stream is None:
        raise ValueError(f"{member.name!r} is not a file")
    return stream.read()


def file_sha256(file: Path) -> str:
    """SHA-256 of a whole file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
