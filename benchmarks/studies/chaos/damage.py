"""Damage random files of results and data, and undo it as a user would."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.results import find_runs

KINDS = ("truncate", "flip", "remove", "duplicate")


@dataclass(frozen=True)
class Damage:
    """One damaged file. root: the run's folder, or that of the data. before: the content of a file of the data."""

    kind: str
    file: Path
    root: Path
    before: bytes | None

    def __str__(self) -> str:
        return f"{self.kind} {self.file.relative_to(self.root.parent)}"

    def undo(self) -> None:
        """Restore a file of the data, remove a damaged run."""
        if self.before is not None:
            self.file.write_bytes(self.before)
        else:
            shutil.rmtree(self.root, ignore_errors=True)


def damage_files(draw: random.Random, results: Path, data: Path) -> list[Damage]:
    """Damage up to two files of runs, and sometimes one of the data."""
    found = []
    for _ in range(draw.choice((0, 1, 1, 2))):
        files = [(file, run.path) for run in find_runs(results) for file in list_files(run.path)]
        if files:
            found.append(_damage(draw, *draw.choice(sorted(files)), in_data=False))
    if draw.random() < 0.2:
        found.append(_damage(draw, draw.choice(sorted(list_files(data))), data, in_data=True))
    return found


def list_files(root: Path) -> Mapping[Path, bytes]:
    """Return the contents of all files below `root` but for locks and caches of hashes."""
    return {
        path: path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith((".", "lock"))
    }


def _damage(draw: random.Random, file: Path, root: Path, *, in_data: bool) -> Damage:
    content = file.read_bytes()
    kind = draw.choice(KINDS if not in_data else KINDS[:3])
    if kind == "truncate":
        file.write_bytes(content[: draw.randrange(len(content) or 1)])
    elif kind == "flip" and content:
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(bytes(changed))
    elif kind == "remove":
        file.unlink()
    elif kind == "duplicate":
        # In place of the same file of another run where there is one, else beside it.
        others = [path for path in root.parent.rglob(file.name) if path != file]
        shutil.copy(file, draw.choice(sorted(others)) if others else file.with_name(f"{file.stem} copy{file.suffix}"))
        root = root.parent if others else root
    return Damage(kind, file, root, content if in_data else None)
