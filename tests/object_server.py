"""Run an S3 server for tests in a process of its own, and count its requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

START_SECONDS = 900.0


@dataclass
class ObjectServer:
    """A running server. bucket: one that exists."""

    address: str
    log: Path
    bucket: str = "results"
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a machine reaches the server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "no_proxy": urlsplit(self.address).hostname or "",
        }

    def count_requests(self, method: str, ending: str) -> int:
        """Count the requests so far with this method for names with this ending."""
        return len(re.findall(rf"{method} [^ ?]*{re.escape(ending)}[? ]", self.log.read_text()))


@contextmanager
def object_server(folder: Path, host: str = "127.0.0.1") -> Iterator[ObjectServer]:
    """Start a server with one empty bucket; its contents are lost at the end."""
    # Here, because collecting the tests must not import it.
    from s3fs import S3FileSystem

    log = folder / "objects.log"
    with log.open("wb") as output:
        # Port 0: the server takes a free port itself.
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", "0"]
        environment = {**os.environ, **ObjectServer(f"http://{host}", log).environment, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        server = ObjectServer(f"http://{host}:{_port(log, process)}", log, process=process)
        _make_bucket(server)
        # s3fs reads the settings once per process, and an earlier test may have used another server.
        S3FileSystem.clear_instance_cache()
        yield server
    finally:
        S3FileSystem.clear_instance_cache()
        process.kill()
        process.wait()


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    """Read the port from the log of the server."""
    deadline = time.monotonic() + START_SECONDS
    while (match := re.search(r"Running on http://\S+:(\d+)\s", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no S3 server: {log.read_text()[-500:]}")
        time.sleep(0.05)
    return int(match[1])


def _make_bucket(server: ObjectServer) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{server.address}/{server.bucket}", method="PUT")
    with direct.open(request, timeout=START_SECONDS):
        pass
