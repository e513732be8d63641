"""Write local files whole or not at all, and hash them."""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A temporary file that is this old (seconds) was left by a process that was killed while it wrote.
ABANDONED_SECONDS = 3600.0


@contextmanager
def replace_at_end(file: Path) -> Iterator[Path]:
    """Yield the name of a temporary file beside `file` that replaces it at the end of the block, not after an error.

    Temporary files that killed writers of `file` left are removed.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            for left in file.parent.glob(f".{glob.escape(file.name)}.*.tmp"):
                if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                    left.unlink()


def write_file(file: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8, or nothing; creates its folder. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_at_end(file) as temporary, temporary.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def file_sha256(file: Path) -> str:
    """Compute the SHA-256 of a whole file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
