"""Which cluster "auto" is: the same that Ray would take, so that a file that nobody keeps up hides none that runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cluster.address import LOCAL, current_cluster, ray_folder
from cluster.ray_cluster import _refuse_silent, _unreached, connected
from procap.errors import UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of Ray, and no node of other tests in sight."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(()))


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of somebody who answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where nobody listens."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def started(scratch: Path, port: int) -> Path:
    """What `ray start` leaves in a folder for temporary files."""
    (scratch / "ray").mkdir(parents=True)
    (scratch / "ray/ray_current_cluster").write_text(f"127.0.0.1:{port}")
    return scratch


@pytest.mark.parametrize("given", [{}, {"TMPDIR": "/a"}, {"RAY_TMPDIR": "/b"}, {"TMPDIR": "/a", "RAY_TMPDIR": "/b"}])
def test_its_folder_is_where_ray_has_it(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._common.utils import get_default_ray_temp_dir

    for name, folder in given.items():
        monkeypatch.setenv(name, folder)
    assert str(ray_folder()) == get_default_ray_temp_dir()
    assert f"logs are in {get_default_ray_temp_dir()}/session_latest/logs;" in str(_unreached(LOCAL, "why"))


def test_a_stale_file_elsewhere_hides_no_cluster(
    listener: int, silent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, right = started(tmp_path / "stale", silent), started(tmp_path / "right", listener)
    monkeypatch.setenv("TMPDIR", str(stale))
    with pytest.raises(UserError, match=rf"no Ray cluster on this machine could .*127\.0\.0\.1:{silent}: conn"):
        _refuse_silent("auto")
    monkeypatch.setenv("RAY_TMPDIR", str(right))
    assert current_cluster() == f"127.0.0.1:{listener}"
    _refuse_silent("auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "nothing"))
    assert current_cluster() == "" and _refuse_silent("auto") is None, "Ray itself says so at once"


def test_a_node_that_runs_counts_for_more_than_a_file(
    listener: int, silent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `ray start --temp-dir`, whose file is in that folder."""
    monkeypatch.setenv("RAY_TMPDIR", str(started(tmp_path, silent)))
    words = ["/opt/ray/raylet", "-c", "echo here; read line", f"--gcs-address=127.0.0.1:{listener}"]
    raylet = subprocess.Popen(words, executable="/bin/sh", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # A process may be there before its command line is.
        assert raylet.stdout and raylet.stdout.readline() == b"here\n"
        node = psutil.Process(raylet.pid)
        monkeypatch.setattr(psutil, "process_iter", lambda: iter([psutil.Process(os.getpid()), node]))
        assert current_cluster() == f"127.0.0.1:{listener}"
        _refuse_silent("auto")
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert current_cluster() == "10.0.0.1:6379"
    finally:
        raylet.send_signal(signal.SIGKILL)
        raylet.wait()


def test_a_ray_of_our_own_that_came_up_too_late_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where much else is done; what Ray raises then is of no kind of its own."""
    import ray

    tried: list[str] = []

    def started_late(*, address: str, **how: object) -> None:
        tried.append(address)
        if len(tried) % 3:
            raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", started_late)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connected(LOCAL):
        assert tried == [LOCAL] * 3
    monkeypatch.setattr("cluster.ray_cluster.OWN_TRIES", 2)
    late = r"Ray did not start on this machine \(The current node timed out during startup\.\)"
    with pytest.raises(UserError, match=late), connected(LOCAL):
        pass
