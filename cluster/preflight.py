"""Check every node before the first run: it needs the same program, data, weights and results folder as the driver."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import node_probe
from cluster.node_probe import Facts, ProbeRequest, probe_node
from cluster.ray_cluster import Node, nodes
from cluster.run import StoragePaths
from procap.errors import UserError
from procap.methods import METHODS

TRAINING_SPLITS = ("train", "val")
"""Splits that training reads, if the data set has them; a node that only trains needs no test split."""
VERSIONS = ("python", "torch", "procap")


def check_nodes(
    paths: StoragePaths,
    datasets: Mapping[str, Collection[str]],
    backbones: Iterable[tuple[str, str | None]],
    timeout: float = 60.0,
    *,
    methods: Iterable[str] = (),
    autoscale: bool = False,
) -> None:
    """Probe all nodes that can execute a run, at once. Built-in data sets are packed here first.

    datasets: each with the splits that are read of it. backbones: name and weights of each. methods: of the runs.
    autoscale: there may be no node yet; those that start later are not checked.
    Raises UserError that names each unusable node with every reason; DataError for the data of this machine.
    """
    import ray

    from shards.default_paths import data_root
    from shards.pack import pack_missing
    from shards.remote import RemoteFolder

    request = make_probe_request(paths, datasets, backbones, methods)
    pack_missing(request.datasets, data_root(request.data))
    found = _working_nodes()
    if not found and not autoscale:
        raise UserError("no node of the cluster has CPUs or GPUs; look at it with `ray status`")
    on_gpus = paths.runtime.device.startswith("cuda")
    requests = [replace(request, node=node.identifier) for node in found]
    try:
        here, problems = probe_node(request)
        if problems:
            raise UserError(f"this machine: {'; '.join(problems)}")
        answers = _probe_all(requests, timeout)
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            # Nodes of one machine share the folder of a submitted job and each replaces it at its first process.
            os.chdir(os.environ["PWD"])
    finally:
        with suppress(Exception):
            RemoteFolder(request.results).delete(f".preflight-{request.nonce}")
    unusable = {node: find_problems(*answer, here) for node, answer in zip(found, answers, strict=True)}
    for node in (node for node, why in unusable.items() if why):
        # A node that died in its check left the file that it wrote.
        with suppress(Exception):
            RemoteFolder(request.results).delete(f".preflight-{request.nonce}-{node.identifier}")
    if on_gpus and not autoscale and not any(node.gpus for node in found):
        unusable = {node: [*reasons, "it has no GPU"] for node, reasons in unusable.items()}
    # Nodes that died meanwhile are left out.
    alive = {node.identifier for node in _working_nodes()}
    lines = [f"{node}: {'; '.join(why)}" for node, why in unusable.items() if why and node.identifier in alive]
    if lines:
        raise UserError(f"{len(lines)} of {len(found)} nodes cannot be used: {' | '.join(lines)}")


def make_probe_request(
    paths: StoragePaths,
    datasets: Mapping[str, Collection[str]],
    backbones: Iterable[tuple[str, str | None]],
    methods: Iterable[str] = (),
) -> ProbeRequest:
    """Make the request of `probe_node` for the driver."""
    files: list[str] = []
    tagged: list[tuple[str, str | None]] = []
    for backbone, weights in dict.fromkeys(backbones):
        own = [name for name in (backbone, weights) if name and ("/" in name or Path(name).is_file())]
        files += own
        if not own and backbone != "mini" and weights != "random":
            tagged.append((backbone, weights))
    return ProbeRequest(
        data=paths.data,
        results=paths.results,
        datasets={name: sorted(splits) for name, splits in datasets.items()},
        files=list(dict.fromkeys(files)),
        backbones=tagged,
        plug_ins=sorted({*methods} - {*METHODS}),
        nonce=uuid.uuid4().hex,
    )


def _working_nodes() -> list[Node]:
    return [node for node in nodes() if node.cpus or node.gpus]


def _probe_all(requests: Sequence[ProbeRequest], timeout: float) -> list[tuple[Facts, list[str]]]:
    """Call `probe_node` on the node of each request, all at once; a node without an answer is a problem of its own."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Pickle the probe by value, so that it also runs on a node without this program and can report that.
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        probe = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        tasks: list[Any] = [
            probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(request.node, soft=False)).remote(request)
            for request in requests
        ]
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=timeout)
    answers: list[tuple[Facts, list[str]]] = []
    for task in tasks:
        try:
            answers.append(ray.get(task, timeout=0))
        except ray.exceptions.GetTimeoutError:
            with suppress(Exception):
                ray.cancel(task, force=True)
            answers.append(({}, [f"no answer within {timeout:g} s"]))
        # Ray raises many different classes for a task that never ran or did not end.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
            answers.append(({}, [f"the check did not run there ({reason})"]))
    return answers


def find_problems(facts: Facts, problems: Iterable[str], here: Facts) -> list[str]:
    """Return why a node cannot execute runs: its own problems, and facts that differ from those of the driver."""
    found = list(problems)
    for what, value in facts.items():
        if value == here.get(what, value):
            continue
        if what in VERSIONS:
            found.append(f"{what} {value}, here {here[what]}")
        else:
            is_code = what.startswith(("program", "method "))
            remedy = "; install the same version, or use `procap submit`, which sends it" if is_code else ""
            found.append(f"{what}: other content than here{remedy}")
    return found
