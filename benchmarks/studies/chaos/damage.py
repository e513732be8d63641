"""Damage random files of results and data, and repair them as a user would."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from runner.run_folders import find_runs


@dataclass(frozen=True)
class Damage:
    """A damaged file. root: folder of the run or of the data. before: content of a file of the data, None for a run."""

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


def damage_files(rng: random.Random, results: Path, data: Path) -> list[Damage]:
    """Damage up to two files of runs, and sometimes one of the data."""
    found = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        if files := [(file, run.path) for run in find_runs(results) for file in list_files(run.path)]:
            file, root = rng.choice(sorted(files))
            found.append(_damage(rng, rng.choice(("truncate", "flip", "remove", "duplicate")), file, root))
    if rng.random() < 0.2:
        file = rng.choice(sorted(list_files(data)))
        found.append(_damage(rng, rng.choice(("truncate", "flip", "remove")), file, data, file.read_bytes()))
    return found


def list_files(root: Path) -> dict[Path, bytes]:
    """Return the contents of all files below `root` but for hidden ones."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")}


def _damage(rng: random.Random, kind: str, file: Path, root: Path, before: bytes | None = None) -> Damage:
    content = bytearray(file.read_bytes())
    if kind == "duplicate":
        # In place of the same file of another run where there is one, else beside it.
        others = sorted(path for path in root.parent.rglob(file.name) if path != file)
        shutil.copy(file, rng.choice(others) if others else file.with_name(f"{file.stem} copy{file.suffix}"))
        return Damage(kind, file, root.parent if others else root, before)
    if kind == "remove":
        file.unlink()
        return Damage(kind, file, root, before)
    if kind == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content if kind == "flip" else content[: rng.randrange(len(content) or 1)])
    return Damage(kind, file, root, before)
