"""Pack a data set into WebDataset shards: the clip-benchmark layout plus an index per split and, last, a manifest.

<data root>/<data set>/  classnames.txt  zeroshot_classification_templates.txt  manifest.json
                         <split>/  nshards.txt  index.npy  paths.txt  digests.bin  0.tar  1.tar ...

The position of an image and the average size decide which shard holds it, before any image is read. So every worker can
start anywhere, and the bytes do not depend on the number of workers.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from procap.errors import UsageError, UserError
from shards.builtin_sources import builtin_source
from shards.check import IMAGES_PER_TASK, CheckedImage, Reporter, SplitProgress, describe_unreadable, find_duplicates
from shards.files import explain_writing, file_lock, file_sha256, write_file
from shards.index import DIGESTS_FILE, INDEX, INDEX_FILE, PATHS_FILE, image_digest, list_digest, shards_digest
from shards.manifest import MANIFEST_FILE, Manifest, Shard, SplitEntry, convention_texts, is_mirror, read_manifest
from shards.mirror import refuse_packing
from shards.names import first_few, join_first, unfit_texts
from shards.reader import ImageList, open_dataset
from shards.resolve import is_packed, resolve_dataset
from shards.source import MEMBER_EXTENSIONS, RecordReader, Source, make_sample, sample_key
from shards.tasks import map_in_order

SHARD_BYTES = 10**9
"""Largest size of a shard, about."""


def pack_missing(names: Iterable[str], data_root: Path) -> None:
    """Pack the generated and bundled sets among `names` that are missing in `data_root`; does nothing in a mirror."""
    if is_mirror(data_root):
        return
    for name in dict.fromkeys(names):
        if not is_packed(data_root, name) and (dataset := resolve_dataset(name, data_root)).images_from != "published":
            pack_source(builtin_source(dataset), data_root)


def pack_source(
    source: Source,
    data_root: Path,
    *,
    force: bool = False,
    workers: int = 1,
    on_progress: SplitProgress | None = None,
    on_note: Reporter | None = None,
) -> Manifest:
    """Pack a source into `data_root/<name>/`, with up to `workers` processes; a valid set is kept without `force`.

    Everything is written to a hidden folder and renamed when it is complete: if a packing is stopped or meets a broken
    image, an older set of that name stays unchanged. on_note: called with notes and problems.
    Raises UserError when all images were read, for all problems together.
    """
    # A manifest has no split without a shard.
    source = replace(source, counts={split: count for split, count in source.counts.items() if count})
    if not source.counts:
        raise UserError(f"'{source.name}' has no images")
    if reason := next(unfit_texts(source.classnames, (source.template, *source.templates)), ""):
        raise UserError(f"'{source.name}': {reason}; names and templates are one line without blanks around it")
    refuse_packing(data_root)
    if on_note:
        for note in source.notes:
            on_note(note)
    folder = data_root / source.name
    # Hidden, so that it never looks like a data set.
    unfinished, replaced = (folder.with_name(f".{source.name}.{state}") for state in ("partial", "replaced"))
    with explain_writing(data_root, "choose another --data folder"):
        data_root.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(f".{source.name}.lock"), remove=True):
            # A packing that was killed leaves its folder.
            shutil.rmtree(unfinished, ignore_errors=True)
            # Inside the lock, because another process may have packed the set while this one waited.
            if not force and not source.problems and (manifest := _find_valid(source, data_root, workers)):
                return manifest
            # The folder is deleted below: never one that packing did not write, such as raw images of that name.
            is_packed_set = (folder / MANIFEST_FILE).exists()
            if folder.exists() and not is_packed_set and (not folder.is_dir() or any(folder.iterdir())):
                hint = "move it away or choose another --data folder"
                raise UserError(f"{folder} exists but is no packed data set; {hint}")
            try:
                manifest = _write(source, unfinished, workers, on_progress, on_note)
                # A rename cannot replace a folder that has files, and a kill while it is deleted leaves half of it.
                shutil.rmtree(replaced, ignore_errors=True)
                if folder.exists():
                    os.rename(folder, replaced)
                os.rename(unfinished, folder)
                shutil.rmtree(replaced, ignore_errors=True)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def check_same_source(source: Source, data_root: Path, yaml_file: Path) -> None:
    """Raise UsageError if a set of that name was packed from other images than `source`, whose YAML file is guessed."""
    if is_packed(data_root, source.name) and read_manifest(data_root / source.name).source != source.origin:
        hint = "rename this one, or replace the set with --force"
        raise UsageError(f"'{source.name}' was packed from another folder than {yaml_file} names: {hint}")


def _find_valid(source: Source, data_root: Path, workers: int) -> Manifest | None:
    """Return the manifest of the existing set if it is whole and has what `source` would pack today."""
    if not (data_root / source.name / MANIFEST_FILE).exists():
        return None
    try:
        dataset = open_dataset(data_root, source.name)
        manifest = dataset.manifest
        packed = (manifest.source, manifest.classnames, manifest.template, manifest.templates, manifest.counts)
        today = (source.origin, source.classnames, source.template, source.templates, source.counts)
        images = {split: dataset.open_images(split) for split in manifest.splits}
        if packed != today:
            return None
        # Without a size there are no files to read: the origin says which program has made the images.
        ranges = source.ranges(IMAGES_PER_TASK) if source.total_bytes is not None else []
        tasks = [
            (source.make_reader(split, start, stop), images[split].subset(range(start, stop)))
            for split, start, stop in ranges
        ]
        is_same = all(map_in_order(_has_content, tasks, min(workers, len(tasks) // 2)))
    except UserError:
        return None
    return manifest if is_same else None


def _has_content(task: tuple[RecordReader, ImageList]) -> bool:
    """Whether images are byte for byte those that were packed."""
    read_records, images = task
    return all(record.data == images.read(i) for i, record in enumerate(read_records()))


@dataclass(frozen=True)
class PackTask:
    """Images start..stop - 1 of a split, to become the shard `file` in `folder`; None: they are only read."""

    folder: Path | None
    split: str
    file: str
    start: int
    stop: int
    read_records: RecordReader


PackedShard = tuple[Shard | None, list[CheckedImage]]
"""A shard with its images; None if it is not stored, because of a problem."""


def _write(
    source: Source, folder: Path, workers: int, on_progress: SplitProgress | None, on_note: Reporter | None
) -> Manifest:
    """Write a data set into `folder`, the manifest last."""
    counts = source.counts
    images = sum(counts.values())
    per_shard = source.per_shard
    # By the average size, because the shards are planned before any image is read.
    while per_shard > 1 and per_shard * (source.total_bytes or 0) > SHARD_BYTES * images:
        per_shard //= 2
    ranges = source.ranges(per_shard)
    # Those of the lists come first. After a problem nothing more is stored, but all images are read nevertheless,
    # so that one attempt names all that are broken.
    problems = [*source.problems]
    tasks = (
        PackTask(None if problems else folder, split, f"{split}/{start // per_shard}.tar", start, stop, reader)
        for split, start, stop in ranges
        for reader in [source.make_reader(split, start, stop)]
    )
    # At most one process per `per_shard` images, because starting one takes as long as packing a few hundred images.
    results = map_in_order(pack_shard, tasks, min(workers, len(ranges), images // per_shard))
    packed: dict[str, list[PackedShard]] = {split: [] for split in counts}
    for (split, _, stop), (packed_shard, shard_problems) in zip(ranges, results, strict=True):
        packed[split].append(packed_shard)
        problems += shard_problems
        if on_progress:
            on_progress(split, stop, counts[split])
    if on_note:
        contents = [(split, image) for split, shards in packed.items() for _, images in shards for image in images]
        for note in find_duplicates(contents):
            on_note(note)
    if len(problems) > 1 and on_note:
        for problem in problems:
            on_note(f"problem: {problem}")
        listed = f"{len(problems):,} problems are listed above; fix them and pack again"
        raise UserError(f"'{source.name}' is not packed: {listed}")
    if problems:
        raise UserError(f"'{source.name}' {join_first(problems)}")
    manifest = Manifest(
        dataset=source.name,
        source=source.origin,
        classnames=source.classnames,
        template=source.template,
        templates=source.templates,
        splits={split: _finish_split(source, folder, split, shards) for split, shards in packed.items()},
    )
    for file, text in convention_texts(manifest).items():
        write_file(folder / file, text)
    write_file(folder / MANIFEST_FILE, manifest.to_json())
    return manifest


def pack_shard(task: PackTask) -> tuple[PackedShard, list[str]]:
    """Write a shard; returns what is in it, and what does not decode. Raises UserError for a name not to be stored."""
    # Imported here, because it takes seconds (it imports torch) and only processes that pack need it.
    from webdataset import TarWriter

    file = task.folder / task.file if task.folder else Path(os.devnull)
    images: list[CheckedImage] = []
    problems: list[str] = []
    file.parent.mkdir(parents=True, exist_ok=True)
    # No encoder, so that bytes stay as they are; no time, so that equal images make equal shards.
    with file.open("wb") as stream, TarWriter(stream, encoder=False, mtime=0) as writer:
        for position, record in zip(range(task.start, task.stop), task.read_records(), strict=True):
            if problem := describe_unreadable(task.split, record):
                problems.append(problem)
                continue
            writer.write(make_sample(sample_key(position), record))
            images.append(CheckedImage(record.path, record.label, image_digest(record.data)))
    if problems or not task.folder:
        return (None, images), problems
    with tarfile.open(file, "r:") as archive:
        members = [member for member in archive if member.name.rpartition(".")[2] in MEMBER_EXTENSIONS]
    pairs = zip(images, members, strict=True)
    images = [image._replace(offset=member.offset_data, size=member.size) for image, member in pairs]
    shard = Shard(file=task.file, sha256=file_sha256(file), size=file.stat().st_size, count=task.stop - task.start)
    return (shard, images), problems


def _finish_split(source: Source, folder: Path, split: str, shards: Sequence[PackedShard]) -> SplitEntry:
    """Write the index and the paths of a split from what is in its shards."""
    images = [(number, image) for number, (_, images) in enumerate(shards) for image in images]
    rows = np.array([(number, image.size, image.offset, image.label) for number, image in images], INDEX)
    paths = [image.path for _, image in images]
    # Few-shot samples and results name images by their paths.
    if repeated := [path for path, count in Counter(paths).items() if count > 1]:
        raise UserError(f"'{source.name}' {split}: {first_few(repeated)} is listed twice")
    text = "".join(f"{path}\n" for path in paths).encode()
    # The same rows always give the same bytes.
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    write_file(folder / split / INDEX_FILE, index := buffer.getvalue())
    write_file(folder / split / PATHS_FILE, text)
    entries = tuple(shard for shard, _ in shards if shard)
    write_file(folder / split / DIGESTS_FILE, shards_digest(entries) + b"".join(image.digest for _, image in images))
    return SplitEntry(
        count=len(images),
        digest=list_digest(paths, rows["label"], source.classnames),
        index_sha256=hashlib.sha256(index).hexdigest(),
        paths_sha256=hashlib.sha256(text).hexdigest(),
        shards=entries,
    )
