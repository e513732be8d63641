"""A web server on 127.0.0.1 for tests that can fail, stop halfway, be slow or redirect."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Answer:
    """One answer. cut: bytes after which the connection ends, `stall` seconds later; wait: seconds before it begins.

    to: a redirect. reason: text of the status line.
    """

    status: int = 200
    cut: int | None = None
    stall: float = 0.0
    wait: float = 0.0
    to: str = ""
    reason: str | None = None


@dataclass
class LocalServer:
    """Serves `folder`. `answers` of a path are used up one by one, then `always`, then the file as it is.

    asked: path of every request, in order; headers: of the last one. ranges: whether it sends the rest of a file.
    """

    folder: Path
    asked: list[str] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    always: dict[str, Answer] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True

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
        return [path for path in self.asked if path.endswith(ending)]


def _handler(server: LocalServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            server.asked.append(path)
            server.headers = dict(self.headers)
            answer = server.answers[path].pop(0) if server.answers[path] else server.always.get(path, Answer())
            time.sleep(answer.wait)
            file = server.folder / path.lstrip("/")
            data = file.read_bytes() if file.is_file() and answer.status == 200 else b""
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            status = answer.status if file.is_file() or answer.status != 200 else 404
            if status == 200 and start and server.ranges:
                data, status = data[start:], 206
            try:
                self.send_response(status, answer.reason)
                if answer.to:
                    self.send_header("Location", answer.to)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: answer.cut])
                self.wfile.flush()
                time.sleep(answer.stall)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *args):
            pass

    return Handler
