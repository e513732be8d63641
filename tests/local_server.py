"""A web server on 127.0.0.1 for tests, which can be told to fail, to stop halfway, to be slow or to point elsewhere."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Answer:
    """What is different in one answer. cut: bytes after which the connection ends; wait: seconds before it begins.

    careless: give a range whatever version it is of.
    """

    status: int = 200
    cut: int | None = None
    wait: float = 0.0
    to: str = ""
    data: bytes | None = None
    careless: bool = False
    length: bool = True


@dataclass
class LocalServer:
    """Serves `folder`. `answers` of a path are used up one by one, then `always`, then the file as it is.

    asked: path and Range header of every request, as they came; headers: of the last one.
    """

    folder: Path
    ranges: bool = True
    asked: list[tuple[str, str]] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    always: dict[str, Answer] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> LocalServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def paths(self, ending: str = "") -> list[str]:
        return [path for path, _ in self.asked if path.endswith(ending)]


def _handler(server: LocalServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            server.asked.append((path, self.headers.get("Range", "")))
            server.headers = dict(self.headers)
            answer = server.answers[path].pop(0) if server.answers[path] else server.always.get(path, Answer())
            time.sleep(answer.wait)
            try:
                self._give(server.folder / path.lstrip("/"), answer)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _give(self, file: Path, answer: Answer) -> None:
            if answer.data is None and answer.status == 200 and not file.is_file():
                answer = Answer(404)
            if answer.status != 200:
                self.send_response(answer.status)
                if answer.to:
                    self.send_header("Location", answer.to)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = file.read_bytes() if answer.data is None else answer.data
            tag = f'"{hashlib.sha256(data).hexdigest()[:12]}"'
            start = self._start(self.headers.get("If-Range", "") if answer.careless else tag, len(data))
            self.send_response(206 if start else 200)
            self.send_header("ETag", tag)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            if answer.length:
                self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            end = len(data) if answer.cut is None else start + answer.cut
            self.wfile.write(data[start:end])

        def _start(self, tag: str, size: int) -> int:
            wanted = self.headers.get("Range", "")
            if not server.ranges or not wanted or self.headers.get("If-Range") != tag:
                return 0
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            return start if start < size else 0

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
