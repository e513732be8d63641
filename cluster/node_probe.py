"""Collect facts about one node of a cluster: versions, data, weights, results. Sent to the node by value.

It must also run on a node without this program: only functions import more than the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PACKAGES = ("procap", "shards", "runner", "cluster", "benchmarks")
SAMPLES, SAMPLE_BYTES = 16, 2**16
"""Bytes sampled from a large file for its digest."""
SEEN_SECONDS = 5.0
"""How long another machine's file may take to appear on a network disk."""

Facts = dict[str, Any]


def probe_node(wants: Facts) -> Facts:
    """Collect versions, and for each data set, file and folder a digest or, behind "!", the error.

    wants: data, results, datasets (each with the splits that are read), files (as strings), backbones (those whose
    weights have a tag), gpus (whether to count them), nonce and name of this node.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts: Facts = {
            "python": platform.python_version(),
            "torch": _version("torch"),
            "procap": _version("procap-bench"),
            "code": _attempt(_code),
            "files": {file: _attempt(partial(_sampled, Path(file))) for file in wants["files"]},
        }
        if not facts["code"].startswith("!"):
            facts["data"] = _data(wants["data"], wants["datasets"])
            facts["results"] = _attempt(lambda: _results(wants["results"], wants["nonce"], wants["name"]))
            facts["weights"] = [_attempt(partial(_weights, *backbone)) for backbone in wants["backbones"]]
            facts["free"] = _attempt(lambda: str(_free(wants["results"])))
        facts["gpus"] = _attempt(_gpus) if wants["gpus"] else ""
    return facts


def _attempt(work: Callable[[], str]) -> str:
    """Return the result of `work`, or "!" and the error in one line: the driver may lack the node's exceptions."""
    try:
        return work()
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        kind = "" if type(error).__module__.split(".")[0] in PACKAGES or where else f"{type(error).__name__}: "
        return f"!{kind}{where}{' '.join(reason.split())[:400]}"


def _version(package: str) -> str:
    try:
        # Builds for other devices behind the plus are the same version.
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _code() -> str:
    """Compute a digest of this program's Python files."""
    roots = {}
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        folders = found.submodule_search_locations if found else None
        if not folders:
            raise ModuleNotFoundError(f"the package {package} of this program is not installed")
        roots[package] = Path(next(iter(folders)))
    return digest_of_source(roots)


def digest_of_source(packages: dict[str, Path]) -> str:
    """Compute a digest of the names and contents of the Python files of packages, given their folders."""
    digest = hashlib.sha256()
    for package, root in packages.items():
        for file in sorted(root.rglob("*.py")):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{package}/{file.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


def _data(given: str, datasets: dict[str, list[str]]) -> dict[str, str]:
    """Compute a digest of each data set's manifest; empty for a data set that is packed on demand."""
    from shards.home import data_root

    root = ""

    def find_root() -> str:
        nonlocal root
        root = str(data_root(given))
        return ""

    problem = _attempt(find_root)
    return {name: problem or _attempt(partial(_dataset, Path(root), name, wanted)) for name, wanted in datasets.items()}


def _dataset(root: Path, name: str, wanted: list[str]) -> str:
    from shards.catalogue import CATALOGUE
    from shards.errors import DataError
    from shards.mirror import is_mirror
    from shards.reader import open_dataset
    from shards.resolve import is_packed

    drawn = name in CATALOGUE and CATALOGUE[name].source != "folder"
    if drawn and not is_mirror(root) and not is_packed(root, name):
        above = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
        if os.access(above, os.W_OK):
            return ""
    manifest = open_dataset(root, name).manifest
    for shard in (shard for split, entry in manifest.splits.items() if split in wanted for shard in entry.shards):
        file = root / name / shard.file
        if not is_mirror(root) and not (os.access(file, os.R_OK) and file.stat().st_size == shard.size):
            raise DataError(f"{file} is missing, cut short or not readable")
    return manifest.digest


def _weights(name: str, tag: str | None) -> str:
    """Compute a digest of a backbone's file."""
    from procap.weights.loading import weights_file

    file = weights_file(name, tag)
    return _sampled(file) if file else ""


def _results(given: str, nonce: str, name: str) -> str:
    """Write a file named after this node for the driver to find; return "!other" if the driver's file is missing."""
    from shards.urls import is_url, local_path

    mark = f".preflight-{nonce}"
    folder = local_path(given)
    if folder is None and is_url(given):
        from shards.remote import RemoteFolder

        there = RemoteFolder(given)
        if name != "driver" and not there.read([f"{mark}/driver"]):
            return "!other"
        there.write(f"{mark}/{name}", nonce.encode())
        return ""
    assert folder is not None
    if name == "driver":
        (folder / mark).mkdir(parents=True)
    elif not wait_for_content(folder / mark / "driver", nonce):
        return "!other"
    (folder / mark / name).write_text(nonce)
    return ""


def wait_for_content(file: Path, content: str) -> bool:
    """Wait up to `SEEN_SECONDS` for a file with that content; return whether it exists."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            if file.read_text() == content:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _free(given: str) -> int:
    """Return the free bytes for results: in their folder, or in the cache if results are a URL."""
    from shards.home import cache_home
    from shards.urls import local_path

    folder = (local_path(given) or cache_home()).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _sampled(file: Path) -> str:
    """Compute a digest of the size and of samples all over a file."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _gpus() -> str:
    """Return the number of GPUs, including those that Ray hides from a task; "!" if torch was built without CUDA."""
    import pynvml
    import torch

    if torch.version.cuda is None:
        return "!torch was built without CUDA"
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
