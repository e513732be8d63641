"""An S3 server of its own process, on 127.0.0.1 if nothing else is said, for tests, whose requests can be counted."""

from __future__ import annotations

import os
import re
import socket
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

START_SECONDS = 60.0


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
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    log = folder / "objects.log"
    server = ObjectServer(f"http://{host}:{port}", log)
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
        environment = {**os.environ, **server.environment, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        _make_bucket(server, process)
        # A process reads the settings of its machine once, and another server may have been here before.
        S3FileSystem.clear_instance_cache()
        yield server
    finally:
        S3FileSystem.clear_instance_cache()
        process.kill()
        process.wait()


def _make_bucket(server: ObjectServer, process: subprocess.Popen[bytes]) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            request = urllib.request.Request(f"{server.address}/{server.bucket}", method="PUT")
            with direct.open(request, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no S3 server: {server.log.read_text()[-500:]}") from None
            time.sleep(0.05)
