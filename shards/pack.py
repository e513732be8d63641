"""Pack a data set into WebDataset shards: the clip-benchmark layout plus an index per split and, last, a manifest.

<data root>/<data set>/  classnames.txt  zeroshot_classification_templates.txt  manifest.json
                         <split>/  nshards.txt  index.json  0.tar  1.tar ...
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.catalogue import find
from shards.errors import DataError
from shards.manifest import FILE, Manifest, SplitEntry, convention_texts, lines_digest, write_text
from shards.reader import open_dataset
from shards.records import Record, Source, source_of
from shards.tar import write_shards

PER_SHARD = 250

# Called with the split's name, the images packed so far and the images of the split.
Progress = Callable[[str, int, int], None]


def pack(
    dataset: str,
    data_root: Path,
    *,
    force: bool = False,
    per_shard: int = PER_SHARD,
    on_progress: Progress | None = None,
) -> Manifest:
    """Pack a data set of the catalogue into `data_root/<name>/`; a valid set that is there already is kept.

    Raises DataUsageError for an unknown name and DataError when the folder cannot be written.
    """
    return pack_source(source_of(find(dataset)), data_root, force=force, per_shard=per_shard, on_progress=on_progress)


def pack_source(
    source: Source,
    data_root: Path,
    *,
    force: bool = False,
    per_shard: int = PER_SHARD,
    on_progress: Progress | None = None,
) -> Manifest:
    """Pack any source of records; see `pack`.

    Everything is written to a hidden folder beside the final one and renamed when it is complete, so an interrupted
    packing leaves nothing that looks finished, a set that was there before stays, and the next call starts it again.
    """
    folder = data_root / source.name
    try:
        data_root.mkdir(parents=True, exist_ok=True)
        with _only_packer(data_root):
            partial = data_root / f".{source.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _put_back(folder)
            kept = None if force else _still_valid(source, data_root)
            if kept is not None:
                return kept
            _refuse_foreign(folder)
            try:
                manifest = _write(source, partial, per_shard, on_progress)
                _swap(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"'{source.name}' cannot be packed into {data_root}: {_reason(error, data_root)}") from error
    return manifest


@contextmanager
def _only_packer(data_root: Path) -> Iterator[None]:
    """Wait until no other process packs into this data root; the lock dies with its process."""
    descriptor = os.open(data_root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks; a lone packer is the usual case there.
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(descriptor)


def _still_valid(source: Source, data_root: Path) -> Manifest | None:
    """The manifest of what is there, if it is whole and describes what `source` would pack today."""
    if not (data_root / source.name / FILE).exists():
        return None
    try:
        manifest = open_dataset(data_root, source.name).manifest
    except DataError:
        return None
    there = (manifest.source, manifest.classnames, manifest.template, manifest.templates)
    today = (source.origin, source.classnames, source.template, source.templates)
    counts = {name: split.count for name, split in manifest.splits.items()}
    return manifest if there == today and counts == source.counts else None


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not (folder / FILE).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists but holds no packed data set; move it away or choose another --data folder")


def _write(source: Source, folder: Path, per_shard: int, on_progress: Progress | None) -> Manifest:
    folder.mkdir()
    splits: dict[str, SplitEntry] = {}
    for split, count in source.counts.items():
        records = _checked(source, split, count, on_progress)
        shards, index = write_shards(records, folder / split, per_shard)
        text = index.model_dump_json() + "\n"
        write_text(folder / split / "index.json", text)
        lines = (
            f"{path}\t{label}\t{source.classnames[label]}" for path, label in zip(index.path, index.label, strict=True)
        )
        splits[split] = SplitEntry(
            count=count,
            digest=lines_digest(lines),
            index_sha256=hashlib.sha256(text.encode()).hexdigest(),
            shards=tuple(shards),
        )
    manifest = Manifest(
        dataset=source.name,
        source=source.origin,
        classnames=source.classnames,
        template=source.template,
        templates=source.templates,
        splits=splits,
    )
    for file, text in convention_texts(manifest).items():
        write_text(folder / file, text)
    write_text(folder / FILE, manifest.to_json())
    return manifest


def _checked(source: Source, split: str, count: int, on_progress: Progress | None) -> Iterator[Record]:
    """The records of a split, each proven to decode and to have a known label; exactly `count` of them."""
    seen = 0
    for record in source.part(split, 0, count).records():
        _refuse_broken(source, split, record)
        seen += 1
        if on_progress:
            on_progress(split, seen, count)
        yield record
    if seen != count:
        raise DataError(f"'{source.name}' {split}: its source gave {seen} images, its list says {count}")


def _refuse_broken(source: Source, split: str, record: Record) -> None:
    from PIL import Image

    if not 0 <= record.label < len(source.classnames):
        known = f"labels go from 0 to {len(source.classnames) - 1}"
        raise DataError(f"'{source.name}' {split}: {record.path} has label {record.label}, {known}")
    try:
        with Image.open(io.BytesIO(record.data)) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        unreadable = f"{record.path} is not a readable image ({error})"
        raise DataError(f"'{source.name}' {split}: {unreadable}; replace it") from error


def _swap(partial: Path, folder: Path) -> None:
    """Put the finished folder in its place; the old one goes only when the new one is complete."""
    old = _displaced(folder)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(partial, folder)
    except BaseException:
        _put_back(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_back(folder: Path) -> None:
    """Undo a swap that was stopped between its two renames."""
    old = _displaced(folder)
    if (old / FILE).exists() and not folder.exists():
        os.rename(old, folder)


def _displaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _reason(error: OSError, data_root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(data_root).free // 2**20
        return f"no space left ({free} MiB free); free some or choose another --data folder"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return "the folder is not writable; choose another --data folder"
    return f"{error.strerror or error}; choose another --data folder"
