"""Fetch published data sets: from the Hub repository that this field uses, or from their official archives.

<data root>/.fetch/<data set>/  the archives, called `.part` until they are whole and verified
                                raw/  CoOp's layout, unpacked from them

An interrupted download is continued. An archive is compared with the SHA-256 that the Hub states, or with the MD5 of
the catalogue; `shards.raw` compares what is unpacked from it with the published split.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from procap.errors import Unreachable, UserError
from shards.catalogue import Archive, Dataset
from shards.raw.published import raw_layout
from shards.remote import file_size, resume_download, translate_errors
from shards.urls import redact

HUB_REPOSITORY = "zhengli97/prompt_learning_dataset"
"""A repository of type "model" with a zip for each data set: its folder as CoOp has it, with the split file."""
WORK_FOLDER = ".fetch"
ATTEMPTS = 5
"""How often a command opens a connection that ends."""


@dataclass(frozen=True)
class FetchPlan:
    """The files of a data set, and where they come from."""

    dataset: Dataset
    origin: str
    files: tuple[Archive, ...]

    @property
    def size(self) -> int:
        return sum(file.size or 0 for file in self.files)


def list_hub() -> dict[str, Archive]:
    """List the files of the Hub repository by name; the Hub is that of `$HF_ENDPOINT`."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    files: dict[str, Archive] = {}
    with translate_errors(f"hf://{HUB_REPOSITORY}"):
        for entry in HfApi().list_repo_tree(HUB_REPOSITORY):
            if isinstance(entry, RepoFile) and entry.lfs:
                url = hf_hub_url(HUB_REPOSITORY, entry.path)
                files[entry.path] = Archive(url, entry.path, size=entry.size, sha256=entry.lfs.sha256)
    return files


def plan_fetch(dataset: Dataset, hub_files: Mapping[str, Archive]) -> FetchPlan:
    """Find the files of a data set: on the Hub, else the official ones, whose servers are asked for the sizes."""
    raw = raw_layout(dataset)
    if raw.hub in hub_files:
        return FetchPlan(dataset, f"hf://{HUB_REPOSITORY}", (hub_files[raw.hub],))
    if not raw.archives:
        raise UserError(f"'{dataset.name}' has no official archive that can be downloaded; get {raw.get}")
    files = tuple(replace(archive, size=file_size(archive.url)) for archive in raw.archives)
    return FetchPlan(dataset, redact(raw.archives[0].url), files)


def work_folder(data_root: Path, name: str) -> Path:
    """Return the folder that a data set is downloaded to and unpacked in."""
    return data_root / WORK_FOLDER / name


def check_space(plans: Sequence[FetchPlan], data_root: Path) -> None:
    """Raise UserError if the disk has no room for all packed sets and, one set at a time, for archive and images."""
    data_root.mkdir(parents=True, exist_ok=True)
    missing = [0]
    for plan in plans:
        files = work_folder(data_root, plan.dataset.name).glob("*")
        missing.append(2 * plan.size - sum(file.stat().st_size for file in files if file.is_file()))
    needed = sum(plan.size for plan in plans) + max(missing)
    free = shutil.disk_usage(data_root).free
    if needed > free:
        names = ", ".join(plan.dataset.name for plan in plans)
        room = f"about {needed / 1e9:,.1f} GB, and {data_root} has {free / 1e9:,.1f} GB free"
        raise UserError(f"{names}: the archive, its images and the shards take {room}; name another --data folder")


def fetch(plan: FetchPlan, data_root: Path, on_progress: Callable[[int], None]) -> Path:
    """Download and unpack the files of a data set; return the raw root that holds its folder.

    One process at a time may do this for a data set. on_progress: called with the bytes of the file that is downloaded.
    """
    folder = work_folder(data_root, plan.dataset.name)
    raw_root = folder / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for file in plan.files:
        fetch_file(file, folder / file.file, on_progress)
    # What a stopped command has unpacked is not whole.
    shutil.rmtree(raw_root, ignore_errors=True)
    for file in plan.files:
        _unpack_file(file, folder / file.file, raw_root)
    return raw_root


def fetch_file(archive: Archive, target: Path, on_progress: Callable[[int], None]) -> None:
    """Download a file to `target`, or continue an earlier download; it appears there whole and verified."""
    # A list has no digest and is small: a server may have sent an error page in its place.
    if target.is_file() and target.suffix != ".json":
        return
    partial = target.with_name(f"{target.name}.part")
    for attempt in range(ATTEMPTS):
        try:
            resume_download(archive.url, partial, archive.size, on_progress)
            break
        except Unreachable:
            if attempt == ATTEMPTS - 1:
                raise
    for algorithm, expected in (("sha256", archive.sha256), ("md5", archive.md5)):
        with partial.open("rb") as stream:
            if expected and hashlib.file_digest(stream, algorithm).hexdigest() != expected:
                partial.unlink()
                what = f"its {algorithm.upper()} is not {expected}"
                raise UserError(
                    f"{target.name} from {redact(archive.url)} is not the expected file: {what}; it was deleted"
                )
    os.replace(partial, target)


def _unpack_file(archive: Archive, file: Path, raw_root: Path) -> None:
    """Unpack an archive, and the one in it, or copy a list."""
    folder = raw_root / archive.into
    folder.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        shutil.copy(file, folder)
        return
    unpack(file, folder)
    if archive.inner:
        inner = folder / archive.inner
        unpack(inner, inner.parent)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar file; no name in it leaves `folder`. Raises UserError for a damaged one, and deletes it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(folder)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        archive.unlink()
        reason = str(error).partition("\n")[0]
        raise UserError(f"{archive.name} is no whole archive ({reason}); it was deleted") from error
