"""Check every node before the first run: it needs the version, the data and the results folder of the driver."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.ray_cluster import nodes
from cluster.trial import StoragePaths
from procap.errors import UserError
from shards.remote import delete, read_files, upload
from shards.urls import join

TRAINING_SPLITS = ("train", "val")
"""Splits that training reads, if the data set has them; a node that only trains needs no test split."""
VISIBLE_SECONDS = 5.0
"""How long a file of another machine may take to appear on a network disk."""


@dataclass(frozen=True)
class Requirements:
    """What runs need on a node, as it is on the driver.

    datasets: splits by name. digests: of the data sets. mark: a file that the driver writes into `results`.
    """

    data: str
    results: str
    datasets: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]
    version: str
    mark: str


def check_nodes(
    paths: StoragePaths, datasets: Mapping[str, Collection[str]], *, autoscale: bool = False, timeout: float = 60.0
) -> None:
    """Check all nodes that can execute runs, at the same time; generated data sets are packed here first.

    datasets: the splits to read of each. autoscale: nodes that start later are not checked.
    Raises UserError that names each unusable node with its reasons, or what is wrong with the data on this machine.
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
    digests = {name: read_digest(paths.data, name, names) for name, names in splits.items()}
    mark = f".preflight-{uuid.uuid4().hex}"
    requirements = Requirements(paths.data, paths.results, splits, digests, version("procap-bench"), mark)
    location = join(paths.results, mark)
    upload(mark.encode(), location)
    try:
        # Without CPUs, as other jobs may hold all of them. A soft strategy would check a different node in place of one
        # that cannot start the task.
        remote_check = ray.remote(num_cpus=0, max_retries=0)(check_node)
        strategies = [NodeAffinitySchedulingStrategy(node.identifier, soft=False) for node in workers]
        tasks = [remote_check.options(scheduling_strategy=strategy).remote(requirements) for strategy in strategies]
        if tasks:
            ray.wait(tasks, num_returns=len(tasks), timeout=timeout)
        problems = {node: _read_answer(task, timeout) for node, task in zip(workers, tasks, strict=True)}
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            # Nodes of one machine share the folder of a submitted job, and each replaces it at its first process: this
            # process is then in the old folder, which was deleted, and has to enter the new one.
            os.chdir(os.environ["PWD"])
    finally:
        with suppress(Exception):
            delete(location)
    # Nodes that died meanwhile are left out.
    alive = {node.identifier for node in nodes()}
    lines = [f"{node}: {'; '.join(why)}" for node, why in problems.items() if why and node.identifier in alive]
    if lines:
        raise UserError(f"{len(lines)} of {len(workers)} nodes cannot be used: {' | '.join(lines)}")


def _read_answer(task: Any, timeout: float) -> list[str]:
    """Return the problems that `check_node` reported, or why it gave no answer."""
    import ray

    try:
        problems: list[str] = ray.get(task, timeout=0)
        return problems
    except ray.exceptions.GetTimeoutError:
        ray.cancel(task, force=True)
        return [f"no answer within {timeout:g} s"]
    # Ray raises many different classes for a task that did not run, as on a node without this program.
    except Exception as error:
        # Ray's texts begin with its own frames and end with the cause.
        return [f"the check did not run: {type(error).__name__}: {' '.join(str(error).split())[-200:]}"]


def check_node(requirements: Requirements) -> list[str]:
    """Compare this node with the driver; returns its problems."""
    problems, installed = [], version("procap-bench")
    if installed != requirements.version:
        folder = Path(__file__).parents[1]
        here = f"procap-bench in {folder} is {installed}"
        problems.append(f"{here}, on the driver {requirements.version}: use `procap submit`")
    try:
        for name, splits in requirements.datasets.items():
            digest, expected = read_digest(requirements.data, name, splits), requirements.digests[name]
            # A data set without a digest is generated on this node before its first run.
            if digest not in (expected, ""):
                problems.append(f"data set {name} is {digest}, on the driver {expected}")
        _check_results(requirements)
    # The driver may not have the class of an exception of this node.
    except Exception as error:
        problems.append(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    return problems


def read_digest(data: str, name: str, splits: Sequence[str]) -> str:
    """Return the digest of a packed data set whose shards have the right sizes; "" if runs generate it first."""
    from shards.catalogue import CATALOGUE
    from shards.default_paths import data_root
    from shards.reader import open_dataset
    from shards.resolve import is_packed

    root = data_root(data)
    if name in CATALOGUE and CATALOGUE[name].images_from != "published" and not is_packed(root, name):
        return ""
    dataset = open_dataset(root, name)
    for split in splits:
        if split in dataset.manifest.splits:
            dataset.check_sizes(split)
    return dataset.manifest.digest


def _check_results(requirements: Requirements) -> None:
    """Read the driver's mark in the results folder and write there. Raises UserError if the mark is not visible."""
    results, mark = requirements.results, requirements.mark
    deadline = time.monotonic() + VISIBLE_SECONDS
    while read_files(results, [mark]) != {mark: mark.encode()}:
        if time.monotonic() > deadline:
            raise UserError(
                f"{results} is not the storage that the driver writes to: use a folder that all nodes "
                "share, or a URL such as s3://bucket/folder"
            )
        time.sleep(0.2)
    node_mark = join(results, f"{mark}-{uuid.uuid4().hex}")
    upload(b"", node_mark)
    delete(node_mark)
