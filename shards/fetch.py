"""Fetch published data sets: from the Hub repository that this field uses, or from their official archives.

<data root>/.fetch/<data set>/  the archives, called `.part` until they are whole and verified
                                raw/  CoOp's layout, unpacked from them

An interrupted download is continued. An archive is compared with the SHA-256 that the Hub states, or with the MD5 of
the catalogue; `shards.raw` compares what is unpacked from it with the published split.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from procap.errors import NotFound, Unreachable, UserError
from shards.catalogue import Archive, Dataset
from shards.raw.published import imagenet_wnids, raw_layout
from shards.remote import file_size, read_blocks, resume_download, translate_errors
from shards.urls import join, redact

HUB_REPOSITORY = "zhengli97/prompt_learning_dataset"
"""A repository with a zip for each data set: its folder as CoOp has it, with the split file."""
IMAGENET_REPOSITORY = "ILSVRC/imagenet-1k"
"""ImageNet's repository, for users who accepted its terms: Parquet files with images, their names and labels."""
IMAGENET_SPLITS = {"data/train-": "imagenet/images/train", "data/validation-": "imagenet/images/val"}
IMAGENET_ACCESS = (
    f"accept the terms at https://huggingface.co/datasets/{IMAGENET_REPOSITORY}, then name your token with "
    "`hf auth login` or $HF_TOKEN; or unpack ImageNet to FOLDER/imagenet/images/train and val, one folder per class, "
    "and: procap data pack imagenet --raw FOLDER"
)
WORK_FOLDER = ".fetch"
LIST_BYTES = 2**24
"""Most bytes of a list of files: servers can send without end."""
ATTEMPTS = 5
"""How often a command opens a connection that ends."""


@dataclass(frozen=True)
class FetchPlan:
    """The files of a data set."""

    dataset: Dataset
    files: tuple[Archive, ...]

    @property
    def size(self) -> int:
        return sum(file.size or 0 for file in self.files)


def list_hub(
    repository: str = HUB_REPOSITORY, folder: str | None = None, repo_type: str = "model"
) -> dict[str, Archive]:
    """List the files of a Hub repository by name; the Hub is that of `$HF_ENDPOINT`."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    files: dict[str, Archive] = {}
    # Not by the Hub's client, which tries six times and reads without end.
    url = join(constants.ENDPOINT, "/".join(filter(None, (f"api/{repo_type}s", repository, "tree/main", folder))))
    with translate_errors(url):
        for entry in json.loads(b"".join(read_blocks(url, LIST_BYTES, headers=build_hf_headers()))):
            # Archives are stored in LFS, which states their SHA-256; small files such as the README are not.
            if lfs := entry.get("lfs"):
                file = hf_hub_url(repository, entry["path"], repo_type=repo_type)
                name = Path(entry["path"]).name
                files[entry["path"]] = Archive(file, name, size=entry["size"], sha256=lfs["oid"])
    return files


def plan_fetch(dataset: Dataset, hub_files: Mapping[str, Archive]) -> FetchPlan:
    """Find the files of a data set: on the Hub, else the official ones, whose servers are asked for the sizes."""
    raw = raw_layout(dataset)
    if raw.layout == "imagenet":
        files = _find_imagenet()
    elif raw.hub in hub_files:
        files = [hub_files[raw.hub]]
    elif raw.archives:
        files = [replace(archive, size=file_size(archive.url)) for archive in raw.archives]
    else:
        raise UserError(f"'{dataset.name}' has no official archive that can be downloaded; get {raw.get}")
    return FetchPlan(dataset, tuple(files))


def describe_source(dataset: Dataset, official: bool) -> tuple[str, str]:
    """Return where a data set comes from, and whose token that needs, "-" for none, without a network."""
    raw = raw_layout(dataset)
    if raw.layout == "imagenet":
        return f"hf://{IMAGENET_REPOSITORY}", "$HF_TOKEN"
    if raw.hub and not official:
        return f"hf://{HUB_REPOSITORY}/{raw.hub}", "-"
    return (redact(raw.archives[0].url) if raw.archives else "no official archive"), "-"


def _find_imagenet() -> list[Archive]:
    """Find ImageNet's Parquet files of the splits train and validation."""
    try:
        listed = list_hub(IMAGENET_REPOSITORY, "data", "dataset")
    except NotFound as error:
        raise UserError(f"{error}: {IMAGENET_ACCESS}") from error
    return [
        replace(file, into=folder)
        for prefix, folder in IMAGENET_SPLITS.items()
        for path, file in sorted(listed.items())
        if path.startswith(prefix)
    ]


def work_folder(data_root: Path, name: str) -> Path:
    """Return the folder that a data set is downloaded to and unpacked in."""
    return data_root / WORK_FOLDER / name


def check_space(plans: Sequence[FetchPlan], data_root: Path) -> None:
    """Raise UserError if the disk has no room for all packed sets and, one set at a time, for archive and images."""
    data_root.mkdir(parents=True, exist_ok=True)
    sizes = [plan.size for plan in plans]
    needed, free = sum(sizes) + 2 * max(sizes, default=0), shutil.disk_usage(data_root).free
    if needed > free:
        names = ", ".join(plan.dataset.name for plan in plans)
        room = f"about {needed / 1e9:,.1f} GB, and {data_root} has {free / 1e9:,.1f} GB free"
        raise UserError(f"{names}: the archive, its images and the shards take {room}; name another --data folder")


def fetch(plan: FetchPlan, data_root: Path, on_progress: Callable[[int], None]) -> Path:
    """Download and unpack a data set, one process at a time; returns the raw root. on_progress: called with bytes."""
    folder = work_folder(data_root, plan.dataset.name)
    raw_root = folder / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    finished = 0
    for file in plan.files:
        fetch_file(file, folder / file.file, lambda done, before=finished: on_progress(before + done))  # type: ignore[misc]
        finished += file.size or 0
    # What a stopped command has unpacked is not whole.
    shutil.rmtree(raw_root, ignore_errors=True)
    for file in plan.files:
        _unpack_file(file, folder / file.file, raw_root)
    return raw_root


def fetch_file(archive: Archive, target: Path, on_progress: Callable[[int], None]) -> None:
    """Download a file to `target`, or continue an earlier download; it appears there whole and verified."""
    from huggingface_hub.utils import build_hf_headers

    # A list has no digest and is small: a server may have sent an error page in its place.
    if target.is_file() and target.suffix != ".json":
        return
    part = target.with_name(f"{target.name}.part")
    gated = IMAGENET_REPOSITORY in archive.url
    # A redirect to a different host drops the token.
    headers = build_hf_headers() if gated else {}
    for attempt in range(ATTEMPTS):
        try:
            resume_download(archive.url, part, archive.size, on_progress, headers)
            break
        except NotFound as error:
            raise UserError(f"{error}: {IMAGENET_ACCESS}" if gated else str(error)) from error
        except Unreachable:
            if attempt == ATTEMPTS - 1:
                raise
    for algorithm, expected in (("sha256", archive.sha256), ("md5", archive.md5)):
        with part.open("rb") as stream:
            if expected and hashlib.file_digest(stream, algorithm).hexdigest() != expected:
                # Kept, it would have the right size at the next attempt, which would download nothing and fail again.
                part.unlink()
                what = f"its {algorithm.upper()} is not {expected}"
                raise UserError(
                    f"{target.name} from {redact(archive.url)} is not the expected file: {what}; it was deleted"
                )
    os.replace(part, target)


def _unpack_file(archive: Archive, file: Path, raw_root: Path) -> None:
    """Unpack an archive, and the one in it, or copy a list."""
    folder = raw_root / archive.into
    folder.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        shutil.copy(file, folder)
    elif file.suffix == ".parquet":
        unpack_parquet(file, folder)
    else:
        unpack(file, folder)
        if archive.inner:
            inner = folder / archive.inner
            unpack(inner, inner.parent)


def unpack_parquet(file: Path, folder: Path) -> None:
    """Write the images of one of ImageNet's Parquet files as the official archive names them, WNID/NAME.JPEG."""
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64, columns=["image", "label"]):
        for row in batch.to_pylist():
            image, wnid = row["image"], imagenet_wnids()[row["label"]]
            name = Path(image["path"]).stem
            # The Hub appends the class to the names of the archive, where those of train begin with it.
            if set(re.findall(r"n\d{8}", name)) - {wnid}:
                raise UserError(f"{file.name} gives the image {image['path']} the label of {wnid}")
            (folder / wnid).mkdir(exist_ok=True)
            (folder / wnid / f"{name.removesuffix(f'_{wnid}')}.JPEG").write_bytes(image["bytes"])


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a zip or tar file; no name in it leaves `folder`. Raises UserError for a damaged one, and deletes it."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(folder)
        elif not hasattr(tarfile, "data_filter"):
            needed = "names in it could lead anywhere; 3.11.4 or newer is needed"
            raise UserError(f"{archive.name} is not unpacked by Python {platform.python_version()}: {needed}")
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        # Kept, it would count as downloaded when the command is repeated.
        archive.unlink()
        reason = str(error).partition("\n")[0]
        raise UserError(f"{archive.name} is no whole archive ({reason}); it was deleted") from error
