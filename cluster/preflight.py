"""Check every node before the first run: it needs the same program, data, weights and results folder as the driver."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import node_probe
from cluster.node_probe import DRIVER, Facts, probe_node
from cluster.paths import StoragePaths
from cluster.ray_cluster import Node, nodes
from procap.errors import UserError

TRAINING_SPLITS = ("train", "val")
"""Splits that training reads, if the data set has them; a node that only trains needs no test split."""
VERSIONS = ("python", "torch", "procap")


def check_nodes(
    paths: StoragePaths,
    datasets: Mapping[str, Collection[str]],
    backbones: Iterable[tuple[str, str | None]],
    timeout: float = 60.0,
    *,
    autoscale: bool = False,
) -> None:
    """Probe all nodes that can execute a run, at once. Built-in data sets are packed here first.

    datasets: each with the splits that are read of it. backbones: name and weights of each.
    autoscale: there may be no node yet; those that start later are not checked.
    Raises UserError that names each unusable node with every reason; DataError for the data of this machine.
    """
    import ray

    from shards.default_paths import data_root
    from shards.pack import pack_missing
    from shards.remote import RemoteFolder

    request = make_request(paths, datasets, backbones)
    pack_missing(request["datasets"], data_root(request["data"]))
    found = _working_nodes()
    if not found and not autoscale:
        raise UserError("no node of the cluster has CPUs or GPUs; look at it with `ray status`")
    needs_gpus = paths.runtime.device.startswith("cuda")
    try:
        # The driver computes nothing, so it may lack weights that have a tag.
        here, problems = probe_node(request | {"name": DRIVER, "backbones": []})
        if problems:
            raise UserError(f"this machine: {'; '.join(problems)}")
        unusable = _probe_all(found, request, here, timeout, needs_gpus)
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            # Nodes of one machine share the folder of a submitted job and each replaces it at its first process.
            os.chdir(os.environ["PWD"])
    finally:
        with suppress(Exception):
            RemoteFolder(request["results"]).delete(f".preflight-{request['nonce']}")
    if needs_gpus and not autoscale and not any(node.gpus for node in found):
        unusable = {node: [*unusable.get(node, []), "it has no GPU"] for node in found}
    if unusable:
        reasons = " | ".join(f"{node}: {'; '.join(problems)}" for node, problems in unusable.items())
        raise UserError(f"{len(unusable)} of {len(found)} nodes cannot be used: {reasons}")


def make_request(
    paths: StoragePaths, datasets: Mapping[str, Collection[str]], backbones: Iterable[tuple[str, str | None]]
) -> dict[str, Any]:
    """Make the request of `probe_node`, see there."""
    files: list[str] = []
    tagged: list[tuple[str, str | None]] = []
    for backbone, weights in dict.fromkeys(backbones):
        own = [name for name in (backbone, weights) if name and ("/" in name or Path(name).is_file())]
        files += own
        if not own and backbone != "mini" and weights != "random":
            tagged.append((backbone, weights))
    return {
        "data": paths.data,
        "results": paths.results,
        "datasets": {name: sorted(splits) for name, splits in datasets.items()},
        "files": list(dict.fromkeys(files)),
        "backbones": tagged,
        "gpus": 0,
        "nonce": uuid.uuid4().hex,
    }


def _working_nodes() -> list[Node]:
    return [node for node in nodes() if node.cpus or node.gpus]


def _probe_all(
    asked: Iterable[Node], request: Mapping[str, Any], here: Facts, timeout: float, needs_gpus: bool
) -> dict[Node, list[str]]:
    """Return the problems of each unusable node; nodes that died meanwhile are left out. here: the driver's facts."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Pickle the probe by value, so that it also runs on a node without this program and can report that.
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        remote = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        tasks: dict[Any, Node] = {}
        for node in asked:
            own = {**request, "name": node.identifier, "gpus": node.gpus if needs_gpus else 0}
            strategy = NodeAffinitySchedulingStrategy(node_id=node.identifier, soft=False)
            tasks[remote.options(scheduling_strategy=strategy).remote(own)] = node
        ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=timeout) if tasks else ([], [])
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    problems: dict[Node, list[str]] = {}
    for task in ready:
        try:
            facts, own_problems = ray.get(task)
            problems[tasks[task]] = find_problems(facts, own_problems, here)
        # Ray raises many different classes for a task that never ran or did not end.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            problems[tasks[task]] = [f"the check did not run there ({reason})"]
    for task in late:
        with suppress(Exception):
            ray.cancel(task, force=True)
        problems[tasks[task]] = [f"no answer within {timeout:g} s"]
    alive = {node.identifier for node in _working_nodes()}
    return {node: reasons for node, reasons in problems.items() if reasons and node.identifier in alive}


def find_problems(facts: Facts, problems: Iterable[str], here: Facts) -> list[str]:
    """Return why a node cannot execute runs: its own problems, and facts that differ from those of the driver."""
    found = list(problems)
    for what, value in facts.items():
        if value == here.get(what, value):
            continue
        if what in VERSIONS:
            found.append(f"{what} {value}, here {here[what]}")
        else:
            remedy = "; install the same version, or use `procap submit`, which sends it" if what == "program" else ""
            found.append(f"{what}: other content than here{remedy}")
    return found
