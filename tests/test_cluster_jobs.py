"""Jobs on a real cluster: `procap submit` and `procap jobs` against the dashboard of a head started by `ray start`."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ports import free_port
from ray_nodes import Nodes

from benchmarks.cli import main
from cluster.address import Dashboard
from cluster.follow import Follower, stopped
from cluster.ray_jobs import RayCluster, Unreachable
from cluster.source_archive import PACKAGES, code_digest, pack
from cluster.submit import RAY_SETTINGS, submission
from procap.errors import UserError

PATIENT = """
import signal, sys, time
def save(*_):
    print("asked to stop", flush=True); time.sleep(4); print("saved", flush=True); sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(900)
"""
TALKER = """
import pathlib, procap, sys, time
print("from", procap.__version__, "with", pathlib.Path("plans/mine.txt").read_text(), sys.argv[2:], flush=True)
for number in range(80):
    while number in (0, 40, 70) and not pathlib.Path(sys.argv[1], str(number)).exists():
        time.sleep(0.1)
    print(f"line {number:02} is as long as lines of a log are, {'x' * number}", flush=True); time.sleep(0.02)
sys.exit(3)
"""
HUSH = "hush-hush-hush"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture
def go(folder: Path) -> Path:
    """Where the job "talker" looks for a file before some of its lines."""
    return folder / "go"


def let_it_talk(go: Path) -> None:
    for line in ("0", "40", "70"):
        (go / line).touch()


@pytest.fixture(scope="module")
def began() -> float:
    """A moment before anything was sent."""
    return time.monotonic()


@pytest.fixture(scope="module")
def cluster(folder: Path, began: float) -> Iterator[RayCluster]:
    """A head with its dashboard, and two jobs sent to it, which run while the tests look at them."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with Nodes(folder, environment={"PATH": path}) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes.head(cpus=2, dashboard=True)
        patch.setenv("RAY_API_SERVER_ADDRESS", nodes.dashboard)
        made = RayCluster(Dashboard(nodes.dashboard, "--address"))
        _send(made, folder)
        yield made


def _send(cluster: RayCluster, folder: Path) -> None:
    """One small tree with a program per job."""
    (folder / "go").mkdir()
    for package in PACKAGES:
        (folder / "tree" / package).mkdir(parents=True)
        (folder / "tree" / package / "__init__.py").write_text('__version__ = "9.9.9"\n')
    (folder / "plans").mkdir()
    (folder / "plans/mine.txt").write_text("what I typed")
    for name, program in (("patient", PATIENT), ("talker", TALKER)):
        (folder / f"tree/benchmarks/{name}.py").write_text(program)
    here = Path.cwd()
    os.chdir(folder)
    try:
        for name, words in (("patient", []), ("talker", [str(folder / "go"), "a word", "$HOME"])):
            parcel = pack(folder / "tree", ["plans/mine.txt"])
            submission(words, f"benchmarks.{name}", parcel, name=name, environment={}, facts={}).send(cluster)
    finally:
        os.chdir(here)


def _seen(log: Callable[[], str], text: str) -> bool:
    patience = time.monotonic() + 120
    while text not in log():
        assert time.monotonic() < patience, log()
        time.sleep(0.1)
    return True


def test_a_command_runs_there_from_this_tree_and_nothing_secret_is_told(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "SOME_SETTING"):
        monkeypatch.setenv(name, HUSH)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql://me:{HUSH}@db/mlflow")
    monkeypatch.setenv("PROCAP_DATA", "/shared/data")
    assert main(["submit", "--name", "listing", "--env", "NCCL_DEBUG=INFO", "--", "ls", "methods"]) == 0
    assert "ProCAP (Abbas et al. 2026)" in capsys.readouterr().out
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"{cluster.dashboard.url}/api/jobs/listing", timeout=120
    ) as answer:
        told = answer.read().decode()
    assert HUSH not in told + cluster.log("listing")
    job = json.loads(told)
    environment = job["runtime_env"]["env_vars"]
    assert set(environment) - {"HF_HUB_OFFLINE"} == {*RAY_SETTINGS, "PROCAP_DATA", "NCCL_DEBUG"}
    assert job["metadata"]["procap_code"] == code_digest() and "commit" in job["metadata"]["procap_source"]


def test_a_taken_id_and_an_unknown_one_are_one_line_each(
    cluster: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--name", "talker", "--", "ls", "methods"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "there is a job talker already" in said[-1] and "--name" in said[-1]
    assert main(["jobs", "follow", "talkre"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "did you mean talker?" in said[0]


def test_ctrl_c_leaves_the_job_running_and_says_how_to_go_on(
    cluster: RayCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    # Also where the tests run in the background of a shell, which ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    typing = threading.Thread(target=lambda: _seen(screen.getvalue, "ready") and os.kill(os.getpid(), signal.SIGINT))
    typing.start()
    try:
        assert main(["jobs", "follow", "patient"]) == 130
        typing.join()
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err
    assert "`procap jobs follow patient`" in told and "`procap jobs stop patient`" in told
    assert cluster.job("patient").status == "RUNNING"


def test_commands_that_are_told_name_the_cluster_where_it_was_typed(
    cluster: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    address = cluster.dashboard.url
    assert main(["jobs", "follow", "talkre", "--address", address]) == 1
    assert f"(`procap jobs --address {address}` lists them)" in capsys.readouterr().err
    assert main(["jobs", "follow", "talkre"]) == 1
    assert "(`procap jobs` lists them)" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"follow it with `procap jobs follow patient --address {address}`, or"):
        cluster.submit(entrypoint="true", submission_id="patient")
    with pytest.raises(UserError, match=f"see `procap jobs --address {address}`$"):
        stopped(cluster, "patient", patience=0, check=lambda: None)


def test_who_loses_a_cluster_is_told_how_to_find_the_job_there_again(cluster: RayCluster) -> None:
    tunnel = Tunnel(int(cluster.dashboard.url.rpartition(":")[2]))
    through = RayCluster(Dashboard(f"http://127.0.0.1:{tunnel.port}", "--address"))
    tunnel.cut()
    again = f"procap jobs follow patient --address {through.dashboard.url}"
    with pytest.raises(Unreachable, match=f"the job may be running: {again}$"):
        Follower(through, "patient", print, tell=print).to_the_end(patience=0)


def test_a_stopped_job_has_the_time_to_save_its_state(cluster: RayCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert _seen(lambda: cluster.log("patient"), "ready")
    assert main(["jobs", "stop", "patient"]) == 0
    assert main(["jobs", "follow", "patient"]) == 143
    assert "asked to stop\nsaved" in capsys.readouterr().out


class Tunnel(threading.Thread):
    """Forwards connections to a port, as `ssh -L` does, until it is cut; a gateway where it answers in its own words.

    instead: what the next connections get, one each; "" is for an answer of who is behind it.
    """

    def __init__(self, target: int, port: int | None = None) -> None:
        super().__init__(daemon=True)
        # One that no connection of somebody else takes as its own while the tunnel is cut.
        self.port, self.target = port or free_port(), target
        self.server = socket.create_server(("127.0.0.1", self.port))
        self.ends: list[socket.socket] = []
        self.instead: list[str] = []
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near = self.server.accept()[0]
                if self.instead and (answer := self.instead.pop(0)):
                    with near:
                        near.recv(65536)
                        near.sendall(answer.encode())
                    continue
                far = socket.create_connection(("127.0.0.1", self.target))
                self.ends += [near, far]
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        near.close()
                        far.close()
                        return
                    (far if source is near else near).sendall(data)

    def cut(self) -> None:
        for end in (self.server, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.mark.slow
def test_a_broken_connection_loses_and_repeats_nothing_of_the_log(cluster: RayCluster, go: Path) -> None:
    target = int(cluster.dashboard.url.rpartition(":")[2])
    tunnel = Tunnel(target)
    written: list[str] = []
    said: list[str] = []
    through = RayCluster(Dashboard(f"http://127.0.0.1:{tunnel.port}", "--address"))
    tunnels = [tunnel]

    def break_it() -> None:
        try:
            _seen(lambda: "".join(written), "from 9.9.9")
            (go / "0").touch()
            _seen(lambda: "".join(written), "line 10")
            tunnel.cut()
            (go / "40").touch()
            _seen(lambda: "".join(said), "lost the connection")
            tunnels.append(Tunnel(target, tunnel.port))
        finally:
            let_it_talk(go)

    breaker = threading.Thread(target=break_it)
    breaker.start()
    job = Follower(through, "talker", written.append, tell=said.append).to_the_end(patience=120)
    breaker.join()
    tunnels[-1].cut()
    assert job.exit_code == 3
    assert "".join(written) == cluster.log("talker")
    assert len(said) == 1 and "lost the connection" in said[0]


def test_the_tree_that_was_sent_is_what_runs_with_the_files_the_command_named(cluster: RayCluster) -> None:
    assert _seen(lambda: cluster.log("talker"), "from 9.9.9 with what I typed ['a word', '$HOME']")


def test_the_exit_code_of_the_job_is_that_of_following_it(
    cluster: RayCluster, go: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    let_it_talk(go)
    assert main(["jobs", "follow", "talker", "--json"]) == 3
    spoken = capsys.readouterr()
    document = json.loads(spoken.out)
    assert (document["job"], document["status"], document["exit_code"]) == ("talker", "FAILED", 3)
    assert "line 79" in spoken.err and "ended with exit code 3" in spoken.err
    assert main(["jobs", "stop", "talker"]) == 0
    assert "had ended before" in capsys.readouterr().err


BROKEN = "HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\n\r\nTraceback\n  line 404\nKeyError: 'gone'"
GATEWAY = "HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n<html>\n<body>nginx</body>\n</html>\n"
BUSY = "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\n"


@pytest.fixture
def gateway(cluster: RayCluster) -> Iterator[tuple[RayCluster, Tunnel]]:
    """The cluster by a way that a test can make fail."""
    tunnel = Tunnel(int(cluster.dashboard.url.rpartition(":")[2]))
    yield RayCluster(Dashboard(f"http://127.0.0.1:{tunnel.port}", "--address")), tunnel
    tunnel.cut()


def test_a_dashboard_that_is_ill_for_a_moment_ends_no_following(
    gateway: tuple[RayCluster, Tunnel], cluster: RayCluster, go: Path
) -> None:
    let_it_talk(go)
    through, tunnel = gateway
    written: list[str] = []
    said: list[str] = []
    assert Follower(cluster, "talker", print, tell=print).to_the_end(patience=120).over
    tunnel.instead += [BROKEN, GATEWAY, BUSY, "", GATEWAY]
    job = Follower(through, "talker", written.append, tell=said.append).to_the_end(patience=120)
    assert job.exit_code == 3 and not tunnel.instead
    assert "".join(written) == cluster.log("talker")
    assert len(said) == 1 and "lost the connection" in said[0]
    tunnel.instead += [BUSY, GATEWAY]
    assert stopped(through, "talker", patience=120, check=lambda: None).over and not tunnel.instead


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(BROKEN, "answered: 500 Internal Server Error: KeyError: 'gone'; try again", id="500"),
        pytest.param(GATEWAY, "answered: 502 Bad Gateway; try again", id="502"),
        pytest.param(BUSY, "answered: 503 Service Unavailable; try again", id="503"),
    ],
)
def test_what_an_ill_dashboard_answers_is_one_line(gateway: tuple[RayCluster, Tunnel], answer: str, words: str) -> None:
    through, tunnel = gateway
    talker = through.job("talker")
    for asked in (through.jobs, lambda: through.stop(talker), lambda: through.find("talker")):
        tunnel.instead.append(answer)
        with pytest.raises(Unreachable) as caught:
            asked()
        assert str(caught.value) == f"{through.dashboard} {words}"


def test_a_job_that_a_gateway_may_have_lost_is_not_said_to_be_refused(gateway: tuple[RayCluster, Tunnel]) -> None:
    through, tunnel = gateway
    tunnel.instead.append(GATEWAY)
    with pytest.raises(Unreachable, match=r"not say whether it took the job \(502 Bad Gateway\): see `procap jobs"):
        through.submit(entrypoint="true", submission_id="lost")


def test_jobs_are_listed_in_order_with_what_became_of_them(
    cluster: RayCluster, began: float, go: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    let_it_talk(go)
    assert main(["jobs", "follow", "talker", "--json"]) == 3
    capsys.readouterr()
    assert main(["jobs", "--json"]) == 0
    listed = {job["job"]: job for job in json.loads(capsys.readouterr().out)}
    assert {"patient", "talker"} <= set(listed) and 1.5 < listed["talker"]["seconds"] < time.monotonic() - began
    assert main(["jobs"]) == 0
    table = capsys.readouterr().out
    assert "'a word' '$HOME'" in table and table.index("patient") < table.index("talker")
