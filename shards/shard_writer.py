"""Write one shard of a data set that is being packed, or keep it from an earlier packing that was stopped.

A folder that is being packed holds `plan.json` (what is packed), `set/` (the data set as it will be) and `finished/`
(for each finished shard what is in it). A shard counts as finished when its tar has the bytes that were written, and
its raw files have not changed since.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from procap.errors import UserError
from shards.check_source import CheckedImage, content_digest, describe_unreadable
from shards.files import file_sha256, replace_at_end, write_file
from shards.images import ImageError, decode, shrink
from shards.manifest import Shard
from shards.manifest_checks import shard_problem
from shards.records import ImageRecord, Part
from shards.tar import image_offset, sample_key, tar_sample


class FinishedShard(BaseModel):
    """The content of a finished shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stamp: str
    shard: Shard
    images: tuple[CheckedImage, ...]


@dataclass(frozen=True)
class ShardTask:
    """Images start..stop - 1 of a split, to become its shard `number` in `partial`; labels are below `classes`."""

    partial: Path
    dataset: str
    split: str
    number: int
    start: int
    stop: int
    part: Part
    classes: int
    resize: int | None

    @property
    def tar(self) -> Path:
        return self.partial / "set" / self.split / f"{self.number}.tar"


def pack_shard(task: ShardTask) -> tuple[FinishedShard, list[str]]:
    """Write a shard unless it is finished, and return its content, and a problem for each image that does not decode.

    A shard with problems is not kept. Raises UserError for a file that cannot be read.
    """
    record = task.partial / "finished" / task.split / f"{task.number}.json"
    stamp = task.part.stamp()
    # An earlier packing may have written it. After a power failure the file can have the right size without its
    # content, so hash it.
    with suppress(OSError, ValueError):
        finished = FinishedShard.model_validate_json(record.read_bytes())
        if finished.stamp == stamp and not shard_problem(task.partial / "set", finished.shard, hashed=True):
            return finished, []
    task.tar.parent.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    # A worker whose parent was killed can outlive it by a moment: each process writes files of its own name.
    with replace_at_end(task.tar) as temporary:
        finished = _write(task, stamp, temporary, problems)
    if problems:
        task.tar.unlink()
    else:
        write_file(record, finished.model_dump_json())
    return finished, problems


def _write(task: ShardTask, stamp: str, file: Path, problems: list[str]) -> FinishedShard:
    # Imported here, because it takes seconds (it imports torch) and only processes that pack need it.
    from webdataset import TarWriter

    where, wanted = f"'{task.dataset}' {task.split}", task.stop - task.start
    from_image = f"(from image {task.start} on)"
    images: list[CheckedImage] = []
    count = 0
    with file.open("wb") as stream, TarWriter(stream, encoder=False, mtime=0) as writer:
        for count, record in enumerate(islice(task.part.records(), wanted + 1), 1):
            if count > wanted:
                raise UserError(f"{where}: its source gave more images, its list says {wanted} {from_image}")
            try:
                data, extension = _check_image(task, record)
            except ImageError as error:
                problems.append(describe_unreadable(task.split, record.path, error))
                continue
            try:
                key = sample_key(task.start + count - 1)
                sample = tar_sample(key, record.path, record.label, data, extension)
            except ValueError as error:
                raise UserError(f"{where}: {record.path!r} cannot be packed: {error}") from None
            offset = image_offset(sample, extension, writer.tarstream.offset)
            images.append(CheckedImage(record.path, record.label, content_digest(record.data), offset, len(data)))
            writer.write(sample)
    if count < wanted:
        raise UserError(f"{where}: its source gave {count} images, its list says {wanted} {from_image}")
    name = f"{task.split}/{task.number}.tar"
    shard = Shard(file=name, sha256=file_sha256(file), size=file.stat().st_size, count=count)
    return FinishedShard(stamp=stamp, shard=shard, images=tuple(images))


def _check_image(task: ShardTask, record: ImageRecord) -> tuple[bytes, str]:
    """Check image and label and return the bytes to store, resized if the task does so. Raises ImageError."""
    if not 0 <= record.label < task.classes:
        where = f"'{task.dataset}' {task.split}"
        raise UserError(f"{where}: {record.path} has label {record.label}, labels go from 0 to {task.classes - 1}")
    smaller = shrink(record.data, task.resize) if task.resize else None
    if smaller is None:
        decode(record.data)
    return smaller or (record.data, record.extension)
