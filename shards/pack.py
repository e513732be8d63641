"""Pack a data set into WebDataset shards: the clip-benchmark layout plus an index per split and, last, a manifest.

<data root>/<data set>/  classnames.txt  zeroshot_classification_templates.txt  manifest.json
                         <split>/  nshards.txt  index.npy  paths.txt  0.tar  1.tar ...

The numbers of the images alone decide which shard holds them, before any image is read. So every worker can start
anywhere, the bytes do not depend on the number of workers, and a stopped packing continues with the missing shards.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from procap.errors import UsageError, UserError
from shards.builtin_sources import builtin_source
from shards.check_source import Reporter, SplitProgress, check_source, find_duplicates, raise_problems
from shards.files import file_lock, write_file
from shards.manifest import FILE, SCHEMA, Manifest, SplitEntry, convention_texts, is_mirror
from shards.manifest_checks import INDEX, INDEX_FILE, PATHS_FILE, index_bytes, list_digest, path_problem
from shards.mirror import refuse_packing
from shards.names import NAME, unfit_texts
from shards.pools import map_in_order
from shards.reader import open_dataset
from shards.records import Source
from shards.resolve import is_packed, resolve_dataset
from shards.shard_writer import FinishedShard, ShardTask, pack_shard

# Images per shard; fewer if a shard would be larger than SHARD_BYTES.
PER_SHARD = 1000
SHARD_BYTES = 10**9


def pack_missing(names: Iterable[str], data_root: Path) -> None:
    """Pack the generated and bundled sets among `names` that are missing in `data_root`; does nothing in a mirror."""
    if is_mirror(data_root):
        return
    for name in dict.fromkeys(names):
        if not is_packed(data_root, name) and (dataset := resolve_dataset(name, data_root)).source != "folder":
            pack_source(builtin_source(dataset), data_root)


def pack_source(
    source: Source,
    data_root: Path,
    *,
    force: bool = False,
    per_shard: int = PER_SHARD,
    workers: int = 1,
    on_progress: SplitProgress | None = None,
    on_note: Reporter | None = None,
) -> Manifest:
    """Pack a source into `data_root/<name>/`, with up to `workers` processes; a valid set that is there is kept.

    Everything is written to a hidden folder beside the final one and renamed when it is complete. If a packing is
    stopped or meets a broken image, an older set of that name stays unchanged, and the next call reuses the finished
    shards whose raw files have not changed. force: start again from the beginning. on_note: called with notes of the
    source and with duplicate images. Raises UserError when all images were read, for all problems together.
    """
    source = replace(source, counts={split: count for split, count in source.counts.items() if count})
    if not NAME.fullmatch(source.name):
        raise UsageError(
            f"{source.name!r:.120} is no name of a data set: letters, digits, '.', '_' and '-' are allowed"
        )
    if not source.counts:
        raise UserError(f"'{source.name}' has no images")
    if reason := next(unfit_texts(source.classnames, (source.template, *source.templates), (source.origin,)), ""):
        raise UserError(f"'{source.name}': {reason}; names and templates are one line without blanks around it")
    refuse_packing(data_root)
    if source.problems:
        source = check_source(source, workers=workers, on_progress=on_progress)
    if on_note:
        list(map(on_note, source.notes))
    raise_problems(source.name, source.problems, on_note)
    folder = data_root / source.name
    # Hidden, so that it never looks like a data set.
    partial = folder.with_name(f".{source.name}.partial")
    try:
        data_root.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_name(f".{source.name}.lock"), remove=True):
            _restore(folder)
            valid = None if force else _find_valid(source, data_root)
            if valid or force:
                shutil.rmtree(partial, ignore_errors=True)
            if valid:
                return valid
            if folder.exists() and not (folder / FILE).exists() and (not folder.is_dir() or any(folder.iterdir())):
                hint = "move it away or choose another --data folder"
                raise UserError(f"{folder} exists but holds no packed data set; {hint}")
            try:
                manifest = _write(source, partial, per_shard, workers, on_progress, on_note)
                _replace(partial / "set", folder)
            except BaseException:
                if not any(partial.glob("finished/*/*.json")):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        room = f" ({_bytes(shutil.disk_usage(data_root).free)} free)" if error.errno == errno.ENOSPC else ""
        reason = f"{error.strerror or error}{room}; choose another --data folder"
        raise UserError(f"'{source.name}' cannot be packed into {data_root}: {reason}") from error
    return manifest


def _replace(complete: Path, folder: Path) -> None:
    """Rename a complete data set to its final folder."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            os.rename(folder, old)
        os.rename(complete, folder)
    except BaseException:
        _restore(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _restore(folder: Path) -> None:
    """Undo a replacement that was stopped between its two renames."""
    old = folder.with_name(f".{folder.name}.old")
    if (old / FILE).exists() and not folder.exists():
        os.rename(old, folder)


def _find_valid(source: Source, data_root: Path) -> Manifest | None:
    """Return the manifest of the existing set if it is whole and describes what `source` would pack today."""
    if not (data_root / source.name / FILE).exists():
        return None
    try:
        found = open_dataset(data_root, source.name, whole=True).manifest
    except UserError:
        return None
    packed = (found.source, found.classnames, found.template, found.templates, found.variant, found.resize)
    today = (source.origin, source.classnames, source.template, source.templates, source.variant, source.resize)
    same = packed == today and {name: split.count for name, split in found.splits.items()} == source.counts
    return found if same else None


def _write(
    source: Source,
    partial: Path,
    per_shard: int,
    workers: int,
    on_progress: SplitProgress | None,
    on_note: Reporter | None,
) -> Manifest:
    """Write a data set into `partial/set/`, the manifest last; finished shards of the same plan are reused."""
    counts = source.counts
    images = sum(counts.values())
    # The size can be an estimate; that of resized images is not known in advance.
    size = source.size if source.resize is None else None
    while per_shard > 1 and per_shard * (size or 0) > SHARD_BYTES * images:
        per_shard //= 2
    plan, plan_file = _plan(source, per_shard), partial / "plan.json"
    if not plan_file.is_file() or plan_file.read_bytes() != plan.encode():
        shutil.rmtree(partial, ignore_errors=True)
    for temporary in partial.rglob(".*.tmp"):
        temporary.unlink(missing_ok=True)
    write_file(plan_file, plan)
    ranges = source.ranges(per_shard)
    tasks = (
        ShardTask(
            partial=partial,
            dataset=source.name,
            split=split,
            number=start // per_shard,
            start=start,
            stop=stop,
            part=source.part(split, start, stop),
            classes=len(source.classnames),
            resize=source.resize,
        )
        for split, start, stop in ranges
    )
    # At most one process per `per_shard` images, because starting one takes as long as packing a few hundred images.
    processes = min(workers, len(ranges), images // per_shard)
    finished: dict[str, list[FinishedShard]] = {split: [] for split in counts}
    problems: list[str] = []
    for (split, _, stop), (shard, broken) in zip(ranges, map_in_order(pack_shard, tasks, processes), strict=True):
        finished[split].append(shard)
        problems += broken
        if on_progress:
            on_progress(split, stop, counts[split])
    if on_note:
        contents = ((split, image) for split, shards in finished.items() for shard in shards for image in shard.images)
        list(map(on_note, find_duplicates(contents, source.classnames)))
    raise_problems(source.name, problems, on_note)
    manifest = Manifest(
        dataset=source.name,
        source=source.origin,
        classnames=source.classnames,
        template=source.template,
        templates=source.templates,
        variant=source.variant,
        resize=source.resize,
        splits={split: _finish_split(source, partial / "set", split, shards) for split, shards in finished.items()},
    )
    for file, text in convention_texts(manifest).items():
        write_file(partial / "set" / file, text)
    write_file(partial / "set" / FILE, manifest.to_json())
    return manifest


def _plan(source: Source, per_shard: int) -> str:
    """Describe everything that the bytes of shards depend on, except the raw files: only equal plans share shards."""
    plan = {
        "schema": SCHEMA,
        "origin": source.origin,
        "variant": source.variant,
        "counts": dict(source.counts),
        "per_shard": per_shard,
        "classnames": source.classnames,
        "resize": source.resize,
    }
    if source.resize:
        from PIL import __version__

        plan["pillow"] = __version__
    return json.dumps(plan)


def _finish_split(source: Source, folder: Path, split: str, shards: Sequence[FinishedShard]) -> SplitEntry:
    """Write the index and the paths of a split from what its finished shards hold."""
    images = [(number, image) for number, shard in enumerate(shards) for image in shard.images]
    rows = np.array([(number, image.size, image.offset, image.label) for number, image in images], INDEX)
    text = "".join(f"{image.path}\n" for _, image in images).encode()
    # Few-shot samples and results name images by their paths.
    if problem := path_problem(text):
        raise UserError(f"'{source.name}' {split}: {problem}")
    index = index_bytes(rows)
    write_file(folder / split / INDEX_FILE, index)
    write_file(folder / split / PATHS_FILE, text)
    return SplitEntry(
        count=len(images),
        digest=list_digest(text, rows["label"], source.classnames),
        index_sha256=hashlib.sha256(index).hexdigest(),
        paths_sha256=hashlib.sha256(text).hexdigest(),
        shards=tuple(shard.shard for shard in shards),
    )


def _bytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
