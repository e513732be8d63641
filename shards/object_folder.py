"""A folder of an object store: list, read, write and delete by name, each failure one line that names the URL."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shards.errors import NotThere
from shards.objects import OBJECT_STORES, ask, failure, filesystem, translated, version
from shards.urls import join, scheme

TOGETHER = 256
MANY_SECONDS = 300.0
"""For an answer about many files."""


@dataclass(frozen=True)
class ObjectFolder:
    """The files below `url`. Names have forward slashes; hidden ones, which begin with a dot, are not there.

    Every method raises DataError: NotThere where the bucket or a right is missing, Unreachable where asking again may
    help.
    """

    url: str

    def list(self, below: str = "") -> dict[str, str]:
        """Version of every file below the folder `below`, by its name relative to that folder."""
        root = join(self.url, below) if below else self.url
        with translated(root):
            files, path = filesystem(root)
            found = ask(files, "find", path, seconds=MANY_SECONDS, detail=True)
        names = {name.removeprefix(f"{path}/"): version(facts) for name, facts in found.items() if name != path}
        return {name: tag for name, tag in names.items() if not any(part[:1] == "." for part in name.split("/"))}

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of files, many at a time; without those that are not there."""
        contents: dict[str, bytes] = {}
        for some in _batched(names, TOGETHER):
            with translated(self.url):
                files, root = filesystem(self.url)
                paths = {f"{root}/{name}": name for name in some}
                found = ask(files, "cat", list(paths), seconds=MANY_SECONDS, on_error="return")
            for path, content in found.items():
                if isinstance(content, bytes):
                    contents[paths[path]] = content
                elif not isinstance(content, FileNotFoundError):
                    raise failure(join(self.url, paths[path]), content)
        return contents

    def write(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """Put a file there whole; `new`: unless there is one of that name, which the answer says.

        Two that write a new file at once are told apart where the store can do that, as S3 and Google's do.
        """
        with translated(join(self.url, name)):
            files, root = filesystem(self.url)
            path = f"{root}/{name}"
            if scheme(self.url) in OBJECT_STORES:
                try:
                    ask(files, "pipe_file", path, content, mode="create" if new else "overwrite")
                except FileExistsError:
                    return False
                return True
            return _write_renamed(files, path, content, new)

    def delete(self, name: str) -> None:
        """Remove a file; nothing to do where it is not there."""
        with translated(join(self.url, name)), suppress(FileNotFoundError, NotThere):
            files, root = filesystem(self.url)
            ask(files, "rm_file", f"{root}/{name}")


def _write_renamed(files: Any, path: str, content: bytes, new: bool) -> bool:
    """`write` where a file is seen while it grows."""
    folder, _, name = path.rpartition("/")
    files.makedirs(folder, exist_ok=True)
    if new and files.exists(path):
        return False
    part = f"{folder}/.{name}.{uuid.uuid4().hex[:12]}.part"
    try:
        files.pipe_file(part, content)
        files.mv(part, path)
    except BaseException:
        with suppress(Exception):
            files.rm_file(part)
        raise
    return True


def _batched(names: Iterable[str], size: int) -> Iterable[tuple[str, ...]]:
    listed = list(names)
    return (tuple(listed[start : start + size]) for start in range(0, len(listed), size))
