"""The split files of seven data sets that CoOp's authors publish, by their names: rows (path, label, class name)."""

import functools
import json
import lzma
from pathlib import Path

FILE = Path(__file__).parent / "published" / "splits.json.xz"


@functools.cache
def _read() -> bytes:
    return lzma.decompress(FILE.read_bytes())


def split_files() -> dict[str, dict[str, list[list]]]:
    return json.loads(_read())
