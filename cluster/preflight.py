"""Check every node before the first run: it needs the program, data and results folder of the driver."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.ray_cluster import nodes
from cluster.run import StoragePaths
from procap.errors import UserError
from procap.methods import METHODS, method_source
from shards.remote import RemoteFolder

PACKAGES = ("procap", "shards", "runner", "cluster", "benchmarks")
TRAINING_SPLITS = ("train", "val")
"""Splits that training reads, if the data set has them; a node that only trains needs no test split."""
VISIBLE_SECONDS = 5.0
"""How long a file of another machine may take to appear on a network disk."""

Facts = dict[str, str]
"""Versions and digests by what they describe; equal on the driver and on every usable node."""


@dataclass(frozen=True)
class Requirements:
    """What runs need on a node. datasets: splits by name. mark: a file that the driver writes into `results`."""

    data: str
    results: str
    datasets: Mapping[str, Sequence[str]]
    plugins: Sequence[str]
    mark: str


def check_nodes(
    paths: StoragePaths,
    datasets: Mapping[str, Collection[str]],
    methods: Iterable[str] = (),
    *,
    autoscale: bool = False,
    timeout: float = 60.0,
) -> None:
    """Check all nodes that can execute runs, at the same time; generated data sets are packed here first.

    datasets: the splits to read of each. autoscale: nodes that start later are not checked.
    Raises UserError that names each unusable node with its reasons, UserError for the data of this machine.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from shards.default_paths import data_root
    from shards.pack import pack_missing

    workers = [node for node in nodes() if node.cpus or node.gpus]
    if not workers and not autoscale:
        raise UserError("no node of the cluster has CPUs or GPUs; see `ray status`")
    pack_missing(datasets, data_root(paths.data))
    splits = {name: sorted(names) for name, names in datasets.items()}
    plugins = sorted({*methods} - {*METHODS})
    requirements = Requirements(paths.data, paths.results, splits, plugins, f".preflight-{uuid.uuid4().hex}")
    expected, results = collect_facts(requirements), RemoteFolder(paths.results)
    results.write(requirements.mark, requirements.mark.encode())
    try:
        remote_check = ray.remote(num_cpus=0, max_retries=0)(check_node)
        strategies = [NodeAffinitySchedulingStrategy(node.identifier, soft=False) for node in workers]
        tasks = [remote_check.options(scheduling_strategy=each).remote(requirements, expected) for each in strategies]
        if tasks:
            ray.wait(tasks, num_returns=len(tasks), timeout=timeout)
        problems = {node: _read_answer(task, timeout) for node, task in zip(workers, tasks, strict=True)}
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            # Nodes of one machine share the folder of a submitted job, and each replaces it at its first process.
            os.chdir(os.environ["PWD"])
    finally:
        with suppress(Exception):
            results.delete(requirements.mark)
    # Nodes that died meanwhile are left out.
    alive = {node.identifier for node in nodes()}
    lines = [f"{node}: {'; '.join(why)}" for node, why in problems.items() if why and node.identifier in alive]
    if lines:
        raise UserError(f"{len(lines)} of {len(workers)} nodes cannot be used: {' | '.join(lines)}")


def _read_answer(task: Any, timeout: float) -> list[str]:
    """Return the problems that `check_node` found, or why it gave no answer."""
    import ray

    try:
        problems: list[str] = ray.get(task, timeout=0)
        return problems
    except ray.exceptions.GetTimeoutError:
        ray.cancel(task, force=True)
        return [f"no answer within {timeout:g} s"]
    # Ray raises many different classes for a task that did not run, as on a node without this program.
    except Exception as error:
        return [f"the check did not run: {type(error).__name__}: {' '.join(str(error).split())[-200:]}"]


def collect_facts(requirements: Requirements) -> Facts:
    """Collect the versions and digests of this machine. Raises UserError for data that is missing or cut short."""
    facts = {"python": platform.python_version(), "torch": version("torch").partition("+")[0]}
    facts["program"] = f"{version('procap-bench')} with the code {_digest_program()}"
    for name in requirements.plugins:
        source = method_source(name)
        facts[f"method {name}"] = source.digest if source else "not installed"
    for name, splits in requirements.datasets.items():
        facts[f"data set {name}"] = _digest_dataset(requirements.data, name, splits)
    return facts


def check_node(requirements: Requirements, expected: Facts) -> list[str]:
    """Compare this node with the driver, whose facts are `expected`; returns its problems."""
    try:
        facts = collect_facts(requirements)
        # A data set without a digest is generated on this node before its first run.
        differing = [what for what, value in expected.items() if facts[what] not in (value, "")]
        problems = [f"{what} is {facts[what]}, on the driver {expected[what]}" for what in differing]
        if facts["program"] != expected["program"]:
            problems += [f"{name} is imported from {_folder_of(name)}" for name in PACKAGES]
            problems.append("install the same version, or use `procap submit`")
        _check_results(requirements)
    # The driver may lack the class of an exception of this node.
    except Exception as error:
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"]
    return problems


def _folder_of(package: str) -> Path:
    return Path(importlib.import_module(package).__path__[0])


def _digest_program() -> str:
    """Compute a digest of the Python files that the wheel contains, by name and content."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        folder = _folder_of(package)
        for name in sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py")):
            digest.update(f"{package}/{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _digest_dataset(data: str, name: str, splits: Sequence[str]) -> str:
    """Return the digest of a packed data set whose shards have the right sizes; "" if runs generate it first."""
    from shards.catalogue import CATALOGUE
    from shards.default_paths import data_root
    from shards.reader import open_dataset
    from shards.resolve import is_packed

    root = data_root(data)
    if name in CATALOGUE and CATALOGUE[name].source != "folder" and not is_packed(root, name):
        return ""
    dataset = open_dataset(root, name)
    for split in splits:
        if split in dataset.manifest.splits:
            dataset.check_sizes(split)
    return dataset.manifest.digest


def _check_results(requirements: Requirements) -> None:
    """Read the driver's mark in the results folder and write there. Raises UserError if the mark is not visible."""
    results, mark = RemoteFolder(requirements.results), requirements.mark
    deadline = time.monotonic() + VISIBLE_SECONDS
    while results.read([mark]) != {mark: mark.encode()}:
        if time.monotonic() > deadline:
            raise UserError(
                f"{requirements.results} is not the storage that the driver writes to: use a folder that all nodes "
                "share, or a URL such as s3://bucket/folder"
            )
        time.sleep(0.2)
    node_mark = f"{mark}-{uuid.uuid4().hex}"
    results.write(node_mark, b"")
    results.delete(node_mark)
