"""Kill random processes of a cluster and damage random files; the results stay those of an undisturbed run.

    python -m benchmarks.studies.chaos --seeds 100 --out docs/results    goes on after the last seed recorded there

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
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.console.output import show
from benchmarks.studies.chaos.damage import Damage, damage_files, list_files
from benchmarks.studies.chaos.hosts import outside_address
from benchmarks.studies.chaos.nodes import Node, Nodes
from benchmarks.studies.chaos.ports import free_port
from benchmarks.studies.chaos.site import Command, Site, facts, left_behind, site, stray, until
from benchmarks.tables.render import markdown_grid
from runner.environment import environment, library_defaults
from runner.remote_results import results_root
from runner.results import write_bytes, write_json

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
MARK = "PROCAP_CHAOS_SEED"
# A lost node or head is noticed sooner than by default.
SOON = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass
class SeedResult:
    """What was drawn for a seed, and what came of it. faults: attempt, seconds after its start, kind and victim."""

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
    """A server that is killed and started again at the same port."""

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

    def answers(self) -> bool:
        with closing(socket.socket()) as visitor:
            return visitor.connect_ex((self.host, self.port)) == 0

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Campaign:
    """The cluster, its servers and the results of undisturbed runs, for seeds one after the other."""

    def __init__(self, place: Site, servers: dict[str, Server], alone: Path) -> None:
        self.site, self.servers, self.alone = place, servers, alone
        self.data = place.folder / "data"
        self.packed = list_files(self.data)
        self.known = {path.name for path in place.folder.iterdir()} | {"results", "home"}

    def run(self, seed: int) -> SeedResult:
        """Repeat a command with faults and damage until it has finished, and check what it leaves."""
        draw = random.Random(f"chaos {seed}")
        name = list(COMMANDS)[seed % len(COMMANDS)]
        drawn = [draw.choice(each) for each in (("folder", "s3"), ("folder", "server"), ("off", "file", "server"))]
        result, began = SeedResult(seed, name, drawn[0], drawn[1], drawn[2]), time.monotonic()
        where = f"s3://results/seed-{seed}" if drawn[0] == "s3" else str(self.site.folder / "results" / f"{seed}")
        words = [*COMMANDS[name], "--results", where, *self.site.cluster]
        words += ["--data", self.servers["shards"].url] if result.data == "server" else []
        tracking = {"off": ["off"], "server": [self.servers["mlflow"].url], "file": []}[result.tracking]
        words += ["--tracking", *tracking] if tracking else []
        disturbed = draw.choice((1, 1, 2))
        damage: list[Damage] = []
        for attempt in range(ATTEMPTS):
            self._restore()
            faults = self._draw_faults(draw, result) if attempt < disturbed else []
            code, err = self._attempt(draw, words, faults, attempt, result)
            result.ends.append(f"{code}: {(err.strip().splitlines() or [''])[-1][-300:]}")
            result.wrong += [f"attempt {attempt}: {what}" for what in unclear(code, err)]
            if code == 0 and attempt >= disturbed:
                break
            if code and not faults and not damage:
                result.wrong.append(f"fails without a fault: {result.ends[-1]}")
            result.refused += bool(code and damage and not faults)
            for one in damage if code else []:
                one.undo()
            new = damage_files(draw, self._local(where), self.data) if attempt < disturbed else []
            damage = ([] if code else damage) + new
            result.damage += map(str, new)
        else:
            result.wrong.append("does not finish")
        # What was damaged in data that no command has read since.
        for one in reversed(damage):
            if one.before is not None:
                one.undo()
        self._check(name, self._local(where), result)
        shutil.rmtree(self._local(where), ignore_errors=True)
        result.seconds = round(time.monotonic() - began, 1)
        return result

    def _local(self, results: str) -> Path:
        """The folder of the results, or the copy of the driver."""
        return results_root(results, Path(self.site.environment["PROCAP_HOME"]))[0]

    def _restore(self) -> None:
        """Three nodes and all servers again."""
        for server in self.servers.values():
            server.start()
        for host in self.site.nodes.hosts:
            host.join()
        if all(node.name != "head" for node in self.site.nodes.alive):
            for node in self.site.nodes.alive:
                node.kill()
        self.site.heal()
        until(lambda: all(server.answers() for server in self.servers.values()))

    def _draw_faults(self, draw: random.Random, result: SeedResult) -> list[tuple[float, str]]:
        absent = {"mlflow": result.tracking != "server", "shards": result.data != "server"}
        absent |= {"objects": result.results != "s3", "network": not self.site.nodes.hosts}
        absent["rank"] = result.command != "two processes"
        kinds = [kind for kind in FAULTS if not absent.get(kind)]
        return sorted((draw.uniform(0, 12), draw.choice(kinds)) for _ in range(draw.randint(1, 3)))

    def _attempt(
        self,
        draw: random.Random,
        words: list[str],
        faults: list[tuple[float, str]],
        attempt: int,
        result: SeedResult,
    ) -> tuple[int, str]:
        """Run the command once; the faults are timed from its start or that of its first trial."""
        command = self.site.procap(*words, on=1, **{MARK: str(result.seed)})
        began, undo = time.monotonic(), list[tuple[float, Callable[[], None]]]()
        zero = None if draw.random() < 0.5 else began
        while command.process.poll() is None and time.monotonic() < began + LIMIT_SECONDS:
            now = time.monotonic()
            zero = zero or (now if left_behind(self.site.nodes.alive) else None)
            while faults and zero is not None and now >= zero + faults[0][0]:
                kind = faults[0][1]
                faults = faults[1:]
                victim, later = self._strike(draw, kind, command)
                result.faults.append((attempt, round(now - began, 1), kind, victim))
                undo += [(now + draw.uniform(2, 15), later)] if later else []
            for moment, later in [*undo]:
                if now >= moment:
                    later()
                    undo.remove((moment, later))
            time.sleep(0.1)
        for _, later in undo:
            later()
        if command.process.poll() is None:
            result.wrong.append(f"attempt {attempt} does not end in {LIMIT_SECONDS:g} s")
            command.process.kill()
        _, err = command.process.communicate()
        return command.process.returncode, err

    def _strike(self, draw: random.Random, kind: str, command: Command) -> tuple[str, Callable[[], None] | None]:
        """Let a fault happen; returns what it hit, and what ends it unless `_restore` does."""
        alive = self.site.nodes.alive
        others = [node for node in alive if node.name != "head"]
        if kind in ("worker", "rank"):
            names = r"ray::Rank" if kind == "rank" else r"ray::(?!IDLE|Dashboard|RuntimeEnv)"
            return kill_one(draw, alive, names), None
        if kind == "raylet":
            return kill_one(draw, others, r"\S*/raylet/raylet "), None
        if kind == "driver":
            number = draw.choice(SIGNALS)
            command.process.send_signal(number)
            return number.name, None
        if kind in self.servers:
            self.servers[kind].kill()
            return kind, self.servers[kind].start
        if kind == "objects":
            # Its content is in its memory, so it is stopped for a while and not killed.
            assert self.site.server is not None and self.site.server.process is not None
            stopped = psutil.Process(self.site.server.process.pid)
            stopped.suspend()
            return kind, stopped.resume
        nodes = [node for node in alive if (node.name == "head") == (kind == "head")]
        node = draw.choice(nodes or [None])
        if node is None:
            return "none", None
        if kind == "network" and node.host:
            node.host.cut()
            return node.name, node.host.join
        node.kill()
        return node.name, None

    def _check(self, name: str, results: Path, result: SeedResult) -> None:
        """Record what differs from the undisturbed run, and what is left."""
        self._restore()
        with suppress(AssertionError):
            until(lambda: not left_behind(self.site.nodes.alive) and not marked(result.seed), 60)
        left = left_behind(self.site.nodes.alive) + marked(result.seed)
        result.wrong += [f"still running: {title[:200]}" for title in left]
        wanted, found = facts(self.alone / name), facts(results)
        if name == "two processes":
            # Sums of gradients in another order round differently.
            wanted, found = ({path: ("", counts) for path, (_, counts) in each.items()} for each in (wanted, found))
        differ = [path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path)]
        result.wrong += [f"other results: {path}" for path in differ]
        result.wrong += [f"left over: {path}" for path in stray(results)]
        outside = {path.name for path in self.site.folder.iterdir()} - self.known
        result.wrong += [f"outside the results: {path}" for path in outside]
        if (data := list_files(self.data)) != self.packed:
            result.wrong.append(f"data changed: {[str(path) for path in data if data[path] != self.packed.get(path)]}")
        if result.tracking == "server" and result.results == "folder":
            twice = [path for path, count in tracked(self.servers["mlflow"].url, results).items() if count > 1]
            result.wrong += [f"in MLflow twice: {path}" for path in twice]


def unclear(code: int, err: str) -> list[str]:
    """Describe an end that is not explained in one line."""
    found = [line for line in err.splitlines() if "Traceback" in line or "internal error" in line]
    errors = [line for line in err.splitlines() if line.startswith("procap: error:")]
    allowed = (0, 1, 3, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT)
    if code not in allowed or (code == 1 and len(errors) != 1) or (code == 3 and "failed" not in err):
        found.append(f"exit code {code} with {len(errors)} reasons")
    return [f"{line[:200]} ... {err[-600:]!r}" for line in found[:1]]


def kill_one(draw: random.Random, nodes: Sequence[Node], pattern: str) -> str:
    """Kill a random process of `nodes` whose command line begins with `pattern`; returns its name."""
    found = []
    for process in (process for node in nodes for process in node.processes()):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            if re.match(pattern, title):
                # Without the folders of this machine, as the record is published.
                found.append((Path(title.split()[0]).name if title.startswith("/") else title[:40], process))
    if not found:
        return "none"
    title, victim = draw.choice(found)
    with suppress(psutil.NoSuchProcess):
        victim.kill()
    return title


def marked(seed: int) -> list[str]:
    """List processes that a command of this seed has started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(seed) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def tracked(uri: str, results: Path) -> Counter[str]:
    """Count the runs of MLflow by their folder, of those below `results`."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    folders = (run.data.tags.get("folder", "") for run in runs)
    return Counter(folder for folder in folders if folder.startswith(str(results.resolve())))


@contextmanager
def campaign(folder: Path) -> Iterator[Campaign]:
    """Start the cluster and the servers, and run each command once in one process."""
    with site(folder, objects=True, more=SOON) as place:
        address, shards, mlflow = outside_address(place.nodes.hosts), free_port(), free_port()
        web = ["http.server", str(shards), "--bind", address, "--directory", str(folder / "data")]
        store = ["mlflow", "server", "--host", address, "--port", str(mlflow), "--workers", "1"]
        store += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--allowed-hosts", f"{address}:{mlflow}"]
        servers = {
            "shards": Server(web, address, shards, folder / "nodes" / "shards.log"),
            "mlflow": Server(store, address, mlflow, folder / "nodes" / "mlflow.log"),
        }
        alone = folder / "alone"
        try:
            for server in servers.values():
                server.start()
            for name, words in COMMANDS.items():
                words = [word for word in words if word not in ("--processes", "2")]
                words += ["--max-concurrent", "1", "--tracking", "off", "--results", str(alone / name)]
                Site(folder, Nodes(folder), place.environment, None, {}).procap(*words).end()
            yield Campaign(place, servers, alone)
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
    library_defaults()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="in all, those recorded in --out included")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of chaos.json and chaos.md")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error("seeds must be at least 1")
    file = arguments.out / "chaos.json"
    seeds: list[dict[str, Any]] = json.loads(file.read_text())["seeds"] if file.exists() else []
    missing = [seed for seed in range(arguments.seeds) if all(seed != one["seed"] for one in seeds)]
    if missing:
        root = tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)
        with root as folder, campaign(Path(folder)) as run:
            for seed in missing:
                seeds = sorted([*seeds, asdict(run.run(seed))], key=lambda one: int(one["seed"]))
                report = {
                    "command": f"python -m benchmarks.studies.chaos --seeds {arguments.seeds}",
                    "environment": environment(),
                    "namespaces": bool(run.site.nodes.hosts),
                    "seeds": seeds,
                }
                write_json(file, report)
                write_bytes(file.with_suffix(".md"), format_report(report).encode())
    if file.exists():
        show(file.with_suffix(".md").read_text())
    return 1 if any(seed["wrong"] for seed in seeds) else 0
