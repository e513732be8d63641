"""What travels to a cluster: the source of this program and the files a command names, in one reproducible archive."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.node_probe import PACKAGES, digest_of_source
from procap.errors import UsageError, UserError
from runner.environment import SOURCE_RECORD, source_state

MOST_BYTES = 100 * 1024**2
NAMED = 5
"""Files that are named when there is too much to send."""

# Where git cannot be asked. Nothing of this kind belongs into a package.
_SKIPPED = ("__pycache__", "build", "dist", "results", "mlruns")
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class SourceArchive:
    """Files by their names in the archive (forward slashes), and what identifies them."""

    files: dict[str, Path]
    record: str
    """What the program there tells of its source, as JSON: commit and cleanliness."""

    @property
    def size(self) -> int:
        """Bytes before compression."""
        return sum(path.stat().st_size for path in self.files.values())

    def write(self, target: Path) -> None:
        """Write the archive; the same files give the same bytes, so that a cluster gets them once."""
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            contents = {name: path.read_bytes() for name, path in self.files.items()}
            for name, content in sorted({**contents, SOURCE_RECORD: self.record.encode()}.items()):
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


def working_tree() -> Path | None:
    """The source tree this program runs from; None when it is an installed copy."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def pack(tree: Path | None, named: Iterable[str] = ()) -> SourceArchive:
    """The five packages of `tree` (none: of nothing), and the files `named` relative to the current folder.

    Raises UsageError for a named file that lies elsewhere or is in the place of another, UserError for more than
    `MOST_BYTES`.
    """
    files = {} if tree is None else {name: tree / name for name in _sources(tree)}
    for name in named:
        plain = Path(os.path.normpath(name))
        if plain.is_absolute() or ".." in plain.parts:
            raise UsageError(f"{name} is not below the current folder: copy it here, or name a file that all nodes see")
        there = files.get(plain.as_posix())
        if there is not None and not there.samefile(plain):
            raise UsageError(f"{name} has the name of one of this program's own files: give it another name")
        files[plain.as_posix()] = Path.cwd() / plain
    if named and tree is None:
        # Ray unpacks the archive into the folder the command then runs in: only the sources would hide a package there.
        hidden = sorted({Path(name).parts[0] for name in files} & set(PACKAGES))
        if hidden:
            raise UsageError(f"a folder {hidden[0]} would hide the package of that name: give it another name")
    parcel = SourceArchive(files, json.dumps(source_state(tree) if tree else None))
    if parcel.size > MOST_BYTES:
        raise UserError(_too_much(parcel))
    return parcel


def code_digest(root: Path | None = None) -> str:
    """A digest of the Python source of the five packages, equal for a tree and for what is installed from it."""
    root = root or Path(__file__).resolve().parent.parent
    return digest_of_source({package: root / package for package in PACKAGES})


def _sources(tree: Path) -> list[str]:
    """Names below `tree` of the packages' files and pyproject.toml, without what git ignores."""
    wanted = (*PACKAGES, "pyproject.toml")
    try:
        command = ["git", "-C", str(tree), "ls-files", "-z", "-co", "--exclude-standard", "--", *wanted]
        listed = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    except (OSError, subprocess.SubprocessError):
        names = []
    if not names:
        names = [
            path.relative_to(tree).as_posix() for name in wanted for path in (tree / name, *(tree / name).rglob("*"))
        ]
    return sorted({name for name in names if (tree / name).is_file() and not _litter(name)})


def _litter(name: str) -> bool:
    parts = name.split("/")
    return name.endswith(".pyc") or any(part in _SKIPPED or part.startswith(".") for part in parts)


def _too_much(parcel: SourceArchive) -> str:
    biggest = sorted(parcel.files, key=lambda name: parcel.files[name].stat().st_size, reverse=True)[:NAMED]
    sizes = ", ".join(f"{name} ({parcel.files[name].stat().st_size / 1e6:,.1f} MB)" for name in biggest)
    return (
        f"{parcel.size / 1e6:,.0f} MB would be sent, of at most {MOST_BYTES / 1e6:,.0f} MB; biggest: {sizes}: keep big "
        "files in a folder that all nodes see, or let git ignore them"
    )
