"""A local server with the routes of the Hugging Face Hub that uploads and downloads of a repository use."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub.constants


@dataclass
class HubServer:
    """repositories: files by their names, or the status with which one is refused; commits: how many there were.

    tokens: of all requests.
    """

    repositories: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    tokens: set[str | None] = field(default_factory=set)

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def connect(self, monkeypatch, cache) -> None:
        """Set what the library reads from the environment when it is imported."""
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        settings = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(cache)}
        # A busy machine answers later than the library waits.
        settings |= {"HF_HUB_ETAG_TIMEOUT": 300, "HF_HUB_DOWNLOAD_TIMEOUT": 300}
        settings |= {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in settings.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_test")

    def answer(self, path: str, body: bytes) -> dict:
        """Answer a POST, as far as the client reads the answer."""
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.repositories.setdefault(f"{asked['organization']}/{asked['name']}", {})
            return {"url": f"{self.url}/{asked['organization']}/{asked['name']}"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return {"files": [{"path": name, "uploadMode": modes[name], "shouldIgnore": False} for name in names]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.url}/objects/{each['oid']}"}}
            return {"transfer": "basic", "objects": objects}
        repository = path.removeprefix("/api/models/").partition("/commit/")[0]
        files = self.repositories[repository]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.objects[line["value"]["oid"]]
        self.commits += 1
        commit = self.commit(repository)
        return {"commitUrl": f"{self.url}/{repository}/commit/{commit}", "commitOid": commit}

    def commit(self, repository: str) -> str:
        """A digest of all files: equal contents are one commit."""
        digests = {name: hashlib.sha256(content).digest() for name, content in self.repositories[repository].items()}
        return hashlib.sha1(repr(sorted(digests.items())).encode()).hexdigest()


def handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, content: bytes, **headers: str) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def do_POST(self) -> None:
            content = json.dumps(hub.answer(urlsplit(self.path).path, self.body())).encode()
            self.reply(200, content, Content_Type="application/json")

        def do_PUT(self) -> None:
            hub.objects[self.path.rpartition("/")[2]] = self.body()
            self.reply(200, b"")

        def do_GET(self) -> None:
            repository, _, rest = self.path[1:].partition("/resolve/")
            name = rest.partition("/")[2]
            files = hub.repositories.get(repository, {})
            if isinstance(files, int):
                return self.reply(files, b"", X_Error_Code="GatedRepo")
            content = files.get(name)
            if content is None:
                code = "EntryNotFound" if repository in hub.repositories else "RepoNotFound"
                return self.reply(404, b"", X_Error_Code=code)
            digest = hashlib.sha256(content).hexdigest()
            self.reply(200, content, ETag=f'"{digest}"', X_Repo_Commit=hub.commit(repository))

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    return Handler
