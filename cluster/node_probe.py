"""Check one node of a cluster: versions, data, weights, results. Sent to the node by value.

It must also run on a node without this program: only functions import more than the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("procap", "shards", "runner", "cluster", "benchmarks")
DRIVER = "driver"
DIGEST_BYTES = 2**22
"""Bytes of a large file that are compared."""
VISIBLE_SECONDS = 5.0
"""How long another machine's file may take to appear on a network disk."""

Facts = dict[str, str]
"""Versions and digests by what they describe; the same on the driver and on every usable node."""


class Unusable(Exception):
    """A reason why this node cannot execute runs."""


@dataclass(frozen=True)
class ProbeRequest:
    """What runs need from a node."""

    data: str
    results: str
    datasets: Mapping[str, Sequence[str]]
    """The splits that are read of each data set."""
    files: Sequence[str]
    """Files of weights."""
    backbones: Sequence[tuple[str, str | None]]
    """Names and tags of the other weights."""
    plug_ins: Sequence[str]
    """Methods of other packages."""
    nonce: str
    """Content of the file that the driver writes into the folder of results."""
    node: str = DRIVER


def probe_node(request: ProbeRequest) -> tuple[Facts, list[str]]:
    """Return the facts about this node and its problems, one line each: the driver may lack the node's exceptions."""
    facts = {"python": platform.python_version(), "torch": _version("torch"), "procap": _version("procap-bench")}
    problems: list[str] = []

    def check(what: str, compute: Callable[..., str], *arguments: Any) -> None:
        try:
            if fact := compute(*arguments):
                facts[what] = fact
        except Exception as error:
            kind = "" if type(error).__module__.split(".")[0] in PACKAGES else f"{type(error).__name__}: "
            problems.append(f"{what}: {kind}{' '.join(str(error).split())[:400]}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check("program", _digest_program)
        for file in request.files:
            check(f"weights {file}", _digest_beginning, Path(file))
        if "program" in facts:
            for name in request.plug_ins:
                check(f"method {name}", _digest_method, name)
            for dataset, splits in request.datasets.items():
                check(f"data {dataset}", _digest_dataset, request.data, dataset, splits)
            # The driver computes nothing, so it may lack weights that have a tag.
            for name, tag in request.backbones if request.node != DRIVER else ():
                check("weights", _check_weights, name, tag)
            check("results", _check_results, request)
    return facts, problems


def _version(package: str) -> str:
    try:
        # Builds for other devices behind the plus are the same version.
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _digest_program() -> str:
    """Compute a digest of the names and contents of this program's Python files."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise Unusable(f"the package {package} of this program is not installed")
        root = Path(next(iter(found.submodule_search_locations)))
        for file in sorted(root.rglob("*.py")):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{package}/{file.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


def _digest_method(name: str) -> str:
    """Return the digest of the package of a plug-in, which is imported."""
    from procap.methods import method_class, method_source

    if (source := method_source(name)) is None:
        raise Unusable("its package is not installed there; install it, or use `procap submit`, which sends it")
    method_class(name)
    return source.digest


def _digest_dataset(data: str, name: str, wanted: Sequence[str]) -> str:
    """Return the digest of a data set's manifest; empty for one that is packed on demand, with the same content."""
    from shards.catalogue import CATALOGUE
    from shards.default_paths import data_root
    from shards.mirror import is_mirror
    from shards.reader import open_dataset
    from shards.resolve import is_packed

    root = data_root(data)
    generated = name in CATALOGUE and CATALOGUE[name].source != "folder"
    if generated and not is_mirror(root) and not is_packed(root, name):
        above = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
        if os.access(above, os.W_OK):
            return ""
    manifest = open_dataset(root, name).manifest
    for shard in (shard for split, entry in manifest.splits.items() if split in wanted for shard in entry.shards):
        file = root / name / shard.file
        if not is_mirror(root) and not (os.access(file, os.R_OK) and file.stat().st_size == shard.size):
            raise Unusable(f"{file} is missing, cut short or not readable")
    return manifest.digest


def _check_weights(name: str, tag: str | None) -> str:
    """Raise if this node lacks the weights. They are not compared with the driver's, which may lack them."""
    from procap.weights.loading import weights_file

    weights_file(name, tag)
    return ""


def _check_results(request: ProbeRequest) -> str:
    """Write the driver's file; on a node look for that file, and write one."""
    from shards.remote import RemoteFolder
    from shards.urls import redact

    there, mark, content = RemoteFolder(request.results), f".preflight-{request.nonce}", request.nonce.encode()
    if request.node == DRIVER:
        there.write(mark, content)
        return ""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while there.read([mark]) != {mark: content}:
        if time.monotonic() > deadline:
            raise Unusable(
                f"{redact(request.results)} there is not the same storage as here; name a folder that all nodes "
                "share, or a URL such as s3://bucket/folder"
            )
        time.sleep(0.2)
    there.write(f"{mark}-{request.node}", content)
    there.delete(f"{mark}-{request.node}")
    return ""


def _digest_beginning(file: Path) -> str:
    """Return the size of a file and the digest of its first bytes, in which other weights differ."""
    with file.open("rb") as stream:
        return f"{file.stat().st_size} {hashlib.sha256(stream.read(DIGEST_BYTES)).hexdigest()[:16]}"
