"""Check every node before the first run: it needs the same program, data, weights and results folder as the driver."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import node_probe
from cluster.node_probe import Facts, probe_node, wait_for_content
from cluster.paths import absolute
from cluster.ray_cluster import Node, nodes
from procap.errors import UserError
from shards.urls import local_path, redact

FREE_BYTES = 256 * 2**20
TRAINING_SPLITS = ("train", "val")
"""Splits that training reads, if the data set has them; a node that only trains needs no test split."""
DRIVER = "driver"


@dataclass(frozen=True)
class Requirements:
    """What the runs need on every node.

    data, results: a folder or a URL, as given; empty data is the node's own default.
    datasets: each with the splits that are read of it. backbones: name and weights of each. device: of --device.
    """

    data: str
    results: str
    datasets: Mapping[str, Collection[str]] = field(default_factory=dict)
    backbones: tuple[tuple[str, str | None], ...] = ()
    device: str = "auto"

    def to_request(self) -> Facts:
        """Convert to the request of `probe_node`; folders become absolute, as nodes have other working folders."""
        files = [str(name) for pair in self.backbones for name in pair if name and _is_file(name)]
        return {
            "data": absolute(self.data),
            "results": absolute(self.results),
            "datasets": {name: sorted(splits) for name, splits in self.datasets.items()},
            "files": list(dict.fromkeys(files)),
            "backbones": [pair for pair in self.backbones if _has_tag(*pair)],
            "gpus": self.device.startswith("cuda"),
        }


def check_nodes(wants: Requirements, timeout: float = 60.0, *, growing: bool = False) -> None:
    """Probe all nodes that can execute a run, at once; Ray is connected already.

    Built-in data sets are packed here first. Dead nodes and those without CPUs and GPUs are left out.
    growing: nodes are started on demand, so that there may be none yet; those that start later are not checked.
    Raises UserError that names each unusable node with every reason, a node that has not answered after `timeout`
    seconds among them; DataError and UserError for what is wrong on this machine.
    """
    from shards.home import data_root
    from shards.pack import pack_missing

    request = wants.to_request() | {"nonce": uuid.uuid4().hex}
    pack_missing(request["datasets"], data_root(request["data"]))
    there = working_nodes()
    if not there and not growing:
        raise UserError("no node of the cluster has CPUs or GPUs; look at it with `ray status`")
    try:
        here = probe_node(request | {"name": DRIVER, "gpus": False, "backbones": []})
        if problems := list(_own_problems(here)):
            raise UserError(f"this machine: {'; '.join(problems)}")
        found = _probe_all(there, request, timeout)
        bad = {node: list(find_problems(node, facts, here, request)) for node, facts in found.items()}
    finally:
        _remove_marks(request)
    if wants.device.startswith("cuda") and not growing and not any(node.gpus for node in there):
        bad |= {node: [*bad.get(node, []), "it has no GPU"] for node in there}
    named = [f"{node}: {'; '.join(reasons)}" for node, reasons in bad.items() if reasons]
    if named:
        raise UserError(f"{len(named)} of {len(there)} nodes cannot be used: {' | '.join(named)}")


def working_nodes() -> list[Node]:
    """The nodes with CPUs or GPUs."""
    return [node for node in nodes() if node.cpus or node.gpus]


def _probe_all(there: Iterable[Node], request: Facts, timeout: float) -> dict[Node, Facts | str]:
    """Return the facts of each node, or why there are none; nodes that died meanwhile are left out."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Pickle the probe by value, so that it also runs on a node without this program and can report that.
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        remote = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        asked: dict[Any, Node] = {}
        for node in there:
            place = NodeAffinitySchedulingStrategy(node_id=node.identifier, soft=False)
            own = request | {"name": node.identifier, "gpus": request["gpus"] and node.gpus > 0}
            asked[remote.options(scheduling_strategy=place).remote(own)] = node
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    found: dict[Node, Facts | str] = {asked[task]: _answer(task) for task in ready}
    for task in late:
        with suppress(Exception):
            ray.cancel(task, force=True)
        found[asked[task]] = f"no answer within {timeout:g} s"
    alive = {node.identifier for node in working_nodes()}
    return {node: found[node] for node in there if node.identifier in alive and node in found}


def _answer(task: Any) -> Facts | str:
    import ray

    try:
        return ray.get(task)
    # Ray raises many different classes for a task that never ran or did not end.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"the check did not run there ({type(error).__name__}: {lines[-1][:200] if lines else ''})"


def find_problems(node: Node, facts: Facts | str, here: Mapping[str, Any], request: Facts) -> Iterator[str]:
    """Yield reasons why `node` with these `facts` cannot execute runs of a driver whose facts are `here`."""
    if isinstance(facts, str):
        yield facts
        return
    for name in ("python", "torch", "procap"):
        if facts[name] != here[name]:
            yield f"{name} {facts[name] or 'is not installed'}, here {here[name] or 'not installed as a package'}"
    if facts["code"] != here["code"]:
        why = facts["code"][1:] if facts["code"].startswith("!") else "other files of the program than here"
        yield f"{why}; install the same version there, or use `procap submit`, which sends it"
    yield from (
        f"weights {file}: {_why(found, 'other bytes than here')}"
        for file, found in facts["files"].items()
        if found != here["files"][file]
    )
    # The driver does not compute, so it may lack weights that have a tag; only the node's own error counts.
    yield from (found[1:] for found in facts.get("weights", []) if found.startswith("!"))
    for name, digest in facts.get("data", {}).items():
        # An empty digest means packed on demand, always with the same content.
        if digest.startswith("!") or (digest and here["data"][name] not in ("", digest)):
            yield f"data: {_why(digest, f'{name} has other content than here')}"
    yield from _results_problems(node.identifier, facts, request)
    if facts["gpus"].startswith("!"):
        yield f"GPUs: {facts['gpus'][1:]}"
    elif facts["gpus"] and int(facts["gpus"]) < node.gpus:
        yield f"{facts['gpus']} GPUs, Ray was told {node.gpus:g}"


def _results_problems(name: str, facts: Facts, request: Facts) -> Iterator[str]:
    if "results" not in facts:
        return
    place = redact(request["results"])
    other = (
        f"results: {place} there is not the same storage as here; name a folder that all nodes share, or a URL such as "
        "s3://bucket/folder"
    )
    if facts["results"] == "!other" or (not facts["results"] and not _is_written(name, request)):
        yield other
    elif facts["results"]:
        yield f"results: {facts['results'][1:]}"
    if facts["free"].startswith("!"):
        yield f"results: {facts['free'][1:]}"
    elif int(facts["free"]) < FREE_BYTES:
        yield f"results: only {int(facts['free']) / 2**20:.0f} MiB free"


def _own_problems(here: Facts) -> Iterator[str]:
    answers = [("weights", found) for found in here["files"].values()]
    answers += [("data", digest) for digest in here.get("data", {}).values()]
    answers += [("results", here.get("results", "")), ("program", here["code"])]
    yield from (f"{what}: {found[1:]}" for what, found in answers if found.startswith("!"))


def _is_written(name: str, request: Facts) -> bool:
    """Return whether the driver can read what the node wrote."""
    mark, nonce = f".preflight-{request['nonce']}", request["nonce"]
    folder = local_path(request["results"])
    if folder is not None:
        return wait_for_content(folder / mark / name, nonce)
    from shards.remote import RemoteFolder

    return RemoteFolder(request["results"]).read([f"{mark}/{name}"]) == {f"{mark}/{name}": nonce.encode()}


def _remove_marks(request: Facts) -> None:
    mark = f".preflight-{request['nonce']}"
    folder = local_path(request["results"])
    if folder is not None:
        shutil.rmtree(folder / mark, ignore_errors=True)
        return
    from shards.remote import RemoteFolder

    with suppress(Exception):
        there = RemoteFolder(request["results"])
        for name in (DRIVER, *(node.identifier for node in working_nodes())):
            there.delete(f"{mark}/{name}")


def _why(found: str, otherwise: str) -> str:
    return found[1:] if found.startswith("!") else otherwise


def _has_tag(name: str, tag: str | None) -> bool:
    return not _is_file(name) and name != "mini" and tag != "random" and not (tag and _is_file(tag))


def _is_file(name: str) -> bool:
    return "/" in name or Path(name).is_file()
