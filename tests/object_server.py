"""An S3 server of its own process, on 127.0.0.1 if nothing else is said, for tests, whose requests can be counted."""

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

from s3fs import S3FileSystem

START_SECONDS = 240.0


@dataclass
class ObjectServer:
    """`environment`: what a machine needs to reach it, as a person would set it; bucket: one that is there."""

    address: str
    log: Path
    bucket: str = "results"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "no_proxy": urlsplit(self.address).hostname or "",
        }

    def asked(self, method: str, ending: str) -> int:
        """Requests of that kind for names with that ending, so far."""
        return len(re.findall(rf"{method} [^ ?]*{re.escape(ending)}[? ]", self.log.read_text()))


@contextmanager
def object_server(folder: Path, host: str = "127.0.0.1") -> Iterator[ObjectServer]:
    """Starts empty but for the bucket; what it holds is lost at the end."""
    log = folder / "objects.log"
    with log.open("wb") as output:
        # A port that it finds itself is nobody else's by the time it listens.
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", "0"]
        environment = {**os.environ, **ObjectServer(f"http://{host}", log).environment, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        server = ObjectServer(f"http://{host}:{_port(log, process)}", log)
        _make_bucket(server)
        # A process reads the settings of its machine once, and another server may have been here before.
        S3FileSystem.clear_instance_cache()
        yield server
    finally:
        S3FileSystem.clear_instance_cache()
        process.kill()
        process.wait()


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    """Where the server says that it listens."""
    deadline = time.monotonic() + START_SECONDS
    while (said := re.search(r"Running on http://\S+:(\d+)\s", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no S3 server: {log.read_text()[-500:]}")
        time.sleep(0.05)
    return int(said[1])


def _make_bucket(server: ObjectServer) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{server.address}/{server.bucket}", method="PUT")
    with direct.open(request, timeout=START_SECONDS):
        pass
