"""Kill random processes of a cluster and damage random files, and compare the results with an undisturbed run.

    python -m benchmarks.studies.chaos --seeds 100 --out docs/results    continues after the last seed recorded there

A local cluster has three nodes, each in a network namespace of its own where this machine permits them, an S3 server, a
server of shards and an MLflow server. For each seed a command is chosen (a suite, a sweep, a run of two processes), and
where its results, data and tracking are. While it runs, up to three faults happen at random moments; then files are
damaged and the command is repeated, first with faults and damage again, then without, until it has finished.

Recorded as wrong: other learned weights or counts than those of one process without faults; an end without a clear
reason; a command that hangs or does not finish; leftover files, files outside the results, changed data; processes
that are left; a run that MLflow has twice. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.console.output import show
from benchmarks.studies.chaos.damage import Damage, damage_files, list_files
from benchmarks.studies.chaos.fault_cluster import (
    Command,
    FaultCluster,
    find_leftovers,
    load_outcomes,
    start_cluster,
    wait_for,
)
from benchmarks.studies.chaos.hosts import machine_address
from benchmarks.studies.chaos.nodes import TRIAL, Node, Nodes, find_trials
from benchmarks.studies.chaos.ports import free_port, is_listening
from benchmarks.studies.record import write_record
from benchmarks.tables.render import markdown_grid
from procap.errors import UserError
from runner.environment import environment
from runner.remote_results import results_root
from runner.tracking.export import KEY_TAG

COMMON = ["--datasets", "digits", "--methods", "maple"]
COMMANDS = {
    "suite": ["bench", "base-to-novel", *COMMON, "--seeds", "1,2,3", "--epochs", "6"],
    "sweep": ["sweep", "--name", "grid", *COMMON, "--seeds", "1", "--shots", "4", "--param", "lr=0.002,0.01,0.05",
              "--epochs", "16", "--batch-size", "4"],
    "two processes": ["bench", "base-to-novel", *COMMON, "--seeds", "1", "--epochs", "8", "--processes", "2"],
}  # fmt: skip
FAULTS = ("worker", "rank", "raylet", "node", "network", "head", "driver", "mlflow", "shards", "objects")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ATTEMPTS = 6
LIMIT_SECONDS = 900.0
SEED_VARIABLE = "PROCAP_CHAOS_SEED"
"""Marks the processes that the command of a seed has started."""
RAY_SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}
"""Lost nodes and heads are detected sooner than by default."""


@dataclass
class SeedResult:
    """The choices and the outcome of a seed. faults: attempt, seconds after its start, kind and victim of each."""

    seed: int
    command: str
    results: str
    data: str
    tracking: str
    faults: list[tuple[int, float, str, str]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Server:
    """A server that is killed and started again at the same port. words: arguments of `python -m`."""

    words: list[str]
    host: str
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        if self.process is None or self.process.poll() is not None:
            quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
            with self.log.open("ab") as log:
                command, env = [sys.executable, "-m", *self.words], {**os.environ, **quiet}
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Campaign:
    """Run seeds one after the other on one cluster. undisturbed: folder of the results of each command."""

    def __init__(self, cluster: FaultCluster, servers: dict[str, Server], undisturbed: Path) -> None:
        self.cluster, self.servers, self.undisturbed = cluster, servers, undisturbed
        self.data = cluster.folder / "data"
        self.packed = list_files(self.data)
        homes = {"home", *(f"home{number}" for number in range(len(cluster.nodes.alive)))}
        self.known = {path.name for path in cluster.folder.iterdir()} | {"results"} | homes

    def run(self, seed: int) -> SeedResult:
        """Repeat a command with faults and damage until it has finished, and check what it leaves."""
        rng = random.Random(f"chaos {seed}")
        name = list(COMMANDS)[seed % len(COMMANDS)]
        storage, data, tracking = (
            rng.choice(each) for each in (("folder", "s3"), ("folder", "server"), ("off", "file", "server"))
        )
        result, began = SeedResult(seed, name, storage, data, tracking), time.monotonic()
        where = f"s3://results/seed-{seed}" if storage == "s3" else str(self.cluster.folder / "results" / f"{seed}")
        results = results_root(where, Path(self.cluster.environment["PROCAP_HOME"]))[0]
        words = [*COMMANDS[name], "--results", where, *self.cluster.flags]
        words += ["--data", self.servers["shards"].url] if data == "server" else []
        if tracking != "file":
            words += ["--tracking", "off" if tracking == "off" else self.servers["mlflow"].url]
        disturbed = rng.choice((1, 1, 2))
        damage: list[Damage] = []
        for attempt in range(ATTEMPTS):
            self._restore()
            faults = self._choose_faults(rng, result) if attempt < disturbed else []
            code, err = self._run_command(rng, words, faults, attempt, result)
            result.ends.append(f"{code}: {(err.strip().splitlines() or [''])[-1][-300:]}")
            result.wrong += [f"attempt {attempt}: {what}" for what in describe_unclear_end(code, err)]
            if code == 0 and attempt >= disturbed:
                break
            if code and not faults and not damage:
                result.wrong.append(f"fails without a fault: {result.ends[-1]}")
            result.refused += bool(code and damage and not faults)
            for one in damage if code else []:
                one.undo()
            new = damage_files(rng, results, self.data) if attempt < disturbed else []
            damage = ([] if code else damage) + new
            result.damage += map(str, new)
        else:
            result.wrong.append("does not finish")
        # Undo damage to data that no command has read since.
        for one in reversed(damage):
            if one.before is not None:
                one.undo()
        self._check(results, result)
        shutil.rmtree(results, ignore_errors=True)
        result.seconds = round(time.monotonic() - began, 1)
        return result

    def _restore(self) -> None:
        """Start what is missing of the three nodes and the servers."""
        for server in self.servers.values():
            server.start()
        for host in self.cluster.nodes.hosts:
            host.reconnect()
        if all(node.name != "head" for node in self.cluster.nodes.alive):
            for node in self.cluster.nodes.alive:
                node.kill()
        self.cluster.restore()
        wait_for(lambda: all(is_listening(server.port, server.host) for server in self.servers.values()))

    def _choose_faults(self, rng: random.Random, result: SeedResult) -> list[tuple[float, str]]:
        """Choose up to three faults of kinds that can happen, as seconds and kind."""
        impossible = {
            "mlflow": result.tracking != "server",
            "shards": result.data != "server",
            "objects": result.results != "s3",
            "network": not self.cluster.nodes.hosts,
            "rank": result.command != "two processes",
        }
        kinds = [kind for kind in FAULTS if not impossible.get(kind)]
        return sorted((rng.uniform(0, 12), rng.choice(kinds)) for _ in range(rng.randint(1, 3)))

    def _run_command(
        self, rng: random.Random, words: list[str], faults: list[tuple[float, str]], attempt: int, result: SeedResult
    ) -> tuple[int, str]:
        """Run the command once, and return its exit code and stderr.

        The times of the faults count from the start of the command or, as often, of its first trial.
        """
        command = self.cluster.procap(*words, on=1, **{SEED_VARIABLE: str(result.seed)})
        began, repairs = time.monotonic(), list[tuple[float, Callable[[], None]]]()
        origin = None if rng.random() < 0.5 else began
        while command.process.poll() is None and time.monotonic() < began + LIMIT_SECONDS:
            now = time.monotonic()
            origin = origin or (now if find_trials(self.cluster.nodes.alive) else None)
            while faults and origin is not None and now >= origin + faults[0][0]:
                kind = faults[0][1]
                victim, repair = self._inject_fault(rng, kind, command)
                if victim == "none" and kind in ("worker", "rank"):
                    # Trials take seconds: wait for the next one.
                    break
                faults = faults[1:]
                result.faults.append((attempt, round(now - began, 1), kind, victim))
                repairs += [(now + rng.uniform(2, 15), repair)] if repair else []
            for moment, repair in [*repairs]:
                if now >= moment:
                    repair()
                    repairs.remove((moment, repair))
            time.sleep(0.1)
        for _, repair in repairs:
            repair()
        if command.process.poll() is None:
            result.wrong.append(f"attempt {attempt} does not end in {LIMIT_SECONDS:g} s")
            command.process.kill()
        _, err = command.process.communicate()
        return command.process.returncode, err

    def _inject_fault(self, rng: random.Random, kind: str, command: Command) -> tuple[str, Callable[[], None] | None]:
        """Cause a fault; returns its victim, and a function that ends the fault unless `_restore` does."""
        alive = self.cluster.nodes.alive
        if kind in ("worker", "rank"):
            return kill_random_process(rng, alive, r"ray::Rank" if kind == "rank" else TRIAL), None
        if kind == "raylet":
            return kill_random_process(rng, [n for n in alive if n.name != "head"], r"\S*/raylet/raylet "), None
        if kind == "driver":
            number = rng.choice(SIGNALS)
            command.process.send_signal(number)
            return number.name, None
        if kind in self.servers:
            self.servers[kind].kill()
            return kind, self.servers[kind].start
        if kind == "objects":
            # Its objects are in its memory, so the process is suspended and not killed.
            assert self.cluster.server is not None and self.cluster.server.process is not None
            server = psutil.Process(self.cluster.server.process.pid)
            server.suspend()
            return kind, server.resume
        nodes = [node for node in alive if (node.name == "head") == (kind == "head")]
        node = rng.choice(nodes or [None])
        if node is None:
            return "none", None
        if kind == "network":
            node.disconnect()
            return node.name, node.reconnect
        node.kill()
        return node.name, None

    def _check(self, results: Path, result: SeedResult) -> None:
        """Record what differs from the undisturbed run, and what is left."""
        self._restore()

        def running() -> list[str]:
            return find_trials(self.cluster.nodes.alive) + find_processes(result.seed)

        with suppress(AssertionError):
            wait_for(lambda: not running(), 60)
        result.wrong += [f"still running: {title[:200]}" for title in running()]
        try:
            wanted, found = load_outcomes(self.undisturbed / result.command), load_outcomes(results)
        except UserError as error:
            result.wrong.append(f"unreadable: {error}")
            return
        if result.command == "two processes":
            # Gradients are summed in another order, which rounds differently, so only the counts are compared.
            wanted, found = ({path: ("", counts) for path, (_, counts) in each.items()} for each in (wanted, found))
        differing = [path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)]
        result.wrong += [f"other results: {path}" for path in differing]
        # A driver that was killed, or left a head that does not answer, cannot delete the file of its check of nodes.
        killed = any(end.startswith("-9:") or "has not answered" in end for end in result.ends)
        left = [path for path in find_leftovers(results) if not (killed and path.startswith(".preflight-"))]
        result.wrong += [f"left over: {path}" for path in left]
        outside = {path.name for path in self.cluster.folder.iterdir()} - self.known
        result.wrong += [f"outside the results: {path}" for path in outside]
        if (data := list_files(self.data)) != self.packed:
            result.wrong.append(f"data changed: {[str(path) for path in data if data[path] != self.packed.get(path)]}")
        if result.tracking == "server" and result.results == "folder":
            counts = count_on_server(self.servers["mlflow"].url, results)
            result.wrong += [f"in MLflow twice: {key}" for key, count in counts.items() if count > 1]


def describe_unclear_end(code: int, err: str) -> list[str]:
    """Describe an end that is not explained in one line; an empty list if it is."""
    found = [line for line in err.splitlines() if "Traceback" in line or "internal error" in line]
    errors = [line for line in err.splitlines() if line.startswith("procap: error:")]
    # A second signal, while Python shuts down after the first, has the default effect: the code is negative.
    signalled = [end for number in SIGNALS[1:] for end in (128 + number, -number)]
    allowed = (0, 1, 3, -signal.SIGKILL, *signalled)
    listed = re.search(r"^procap: \d+ done, \d+ failed:$", err, re.MULTILINE) is not None
    if code not in allowed or (code == 1 and len(errors) + listed != 1) or (code == 3 and not listed):
        found.append(f"exit code {code} with {len(errors)} reasons")
    return [f"{line[:200]} ... {err[-600:]!r}" for line in found[:1]]


def kill_random_process(rng: random.Random, nodes: Sequence[Node], pattern: str) -> str:
    """Kill a random process of `nodes` whose command line begins with `pattern`; returns its name."""
    found = [each for node in nodes for each in node.find_processes(pattern)]
    if not found:
        return "none"
    title, victim = rng.choice(found)
    with suppress(psutil.NoSuchProcess):
        victim.kill()
    # The record is published, so it does not name folders of this machine.
    return Path(title.split()[0]).name if title.startswith("/") else title[:40]


def find_processes(seed: int) -> list[str]:
    """List the command lines of the processes that the command of this seed has started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(SEED_VARIABLE) == str(seed) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def count_on_server(uri: str, results: Path) -> Counter[str]:
    """Count how often the MLflow server at `uri` has each training below `results`, by its key."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = [run.data.tags for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    below = str(results.resolve())
    return Counter(tags.get(KEY_TAG, "") for tags in runs if tags.get("folder", "").startswith(below))


@contextmanager
def start_campaign(folder: Path) -> Iterator[Campaign]:
    """Start the cluster and the servers, and run each command once in one process."""
    with start_cluster(folder, objects=True, settings=RAY_SETTINGS) as cluster:
        address, shards, mlflow = machine_address(cluster.nodes.hosts), free_port(), free_port()
        web = ["http.server", str(shards), "--bind", address, "--directory", str(folder / "data")]
        store = ["mlflow", "server", "--host", address, "--port", str(mlflow), "--workers", "1"]
        store += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--allowed-hosts", f"{address}:{mlflow}"]
        servers = {
            "shards": Server(web, address, shards, folder / "nodes" / "shards.log"),
            "mlflow": Server(store, address, mlflow, folder / "nodes" / "mlflow.log"),
        }
        undisturbed = folder / "alone"
        try:
            for server in servers.values():
                server.start()
            here = FaultCluster(folder, Nodes(folder), cluster.environment)
            for name, words in COMMANDS.items():
                words = [word for word in words if word not in ("--processes", "2")]
                words += ["--max-concurrent", "1", "--tracking", "off", "--results", str(undisturbed / name)]
                here.procap(*words).wait()
            yield Campaign(cluster, servers, undisturbed)
        finally:
            for server in servers.values():
                server.kill()


def format_report(report: dict[str, Any]) -> str:
    """Format the record of all seeds as Markdown."""
    seeds = report["seeds"]
    hits = Counter(kind for seed in seeds for _, _, kind, victim in seed["faults"] if victim != "none")
    damage = Counter(text.split()[0] for seed in seeds for text in seed["damage"])
    wrong = [f"- seed {seed['seed']}: {text}" for seed in seeds for text in seed["wrong"]]
    rows: list[tuple[str, object]] = [
        ("seeds", len(seeds)),
        *((f"{kind} lost" if kind not in ("network", "objects") else f"{kind} away", hits[kind]) for kind in FAULTS),
        *((f"files damaged: {kind}", count) for kind, count in sorted(damage.items())),
        ("starts of a command", sum(len(seed["ends"]) for seed in seeds)),
        ("clear refusals of damaged files", sum(seed["refused"] for seed in seeds)),
        ("seconds of a seed, mean", f"{sum(seed['seconds'] for seed in seeds) / max(len(seeds), 1):.0f}"),
        ("**wrong**", f"**{len(wrong)}**"),
    ]
    cpu = report["environment"]["cpu"]
    parts = [
        "# Random faults of every kind at once",
        f"{cpu['name']}, {cpu['cores']} cores; three nodes{' in network namespaces' if report['namespaces'] else ''}.",
        f"    {report['command']}",
        markdown_grid(("", ""), [[what, str(value)] for what, value in rows], left=1),
        *(["Wrong:", "\n".join(wrong)] if wrong else []),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds that are not recorded yet; writes chaos.json and chaos.md after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="in all, those recorded in --out included")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of chaos.json and chaos.md")
    flags = parser.parse_args(argv)
    if flags.seeds < 1:
        parser.error("seeds must be at least 1")
    file = flags.out / "chaos.json"
    seeds: list[dict[str, Any]] = json.loads(file.read_text())["seeds"] if file.exists() else []
    missing = [seed for seed in range(flags.seeds) if all(seed != one["seed"] for one in seeds)]
    if missing:
        root = tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)
        with root as folder, start_campaign(Path(folder)) as campaign:
            for seed in missing:
                seeds = sorted([*seeds, asdict(campaign.run(seed))], key=lambda one: int(one["seed"]))
                report = {
                    "command": f"python -m benchmarks.studies.chaos --seeds {flags.seeds}",
                    "environment": environment(),
                    "namespaces": bool(campaign.cluster.nodes.hosts),
                    "seeds": seeds,
                }
                write_record(file, report, format_report(report))
    if file.exists():
        show(file.with_suffix(".md").read_text())
    return 1 if any(seed["wrong"] for seed in seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
