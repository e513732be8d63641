"""Which files of results are kept at a URL, and what this machine knows of those that are."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from runner.collection import COLLECTIONS
from runner.results import write_json

FILE = ".store.json"
TRAIN, CHECKPOINT = "train.json", "checkpoint.safetensors"
RUN = re.compile(r"(?:.*/)?seed\d+-[0-9a-f]{8}(?=/|$)")
# MLflow's own: one machine's database, and copies of what is in the runs.
LOCAL_ONLY = re.compile(r"(mlruns|mlartifacts)/|mlflow\.db")

Stamp = list[int]
"""Size and time of the last change (ns) of a file on the disk; any writing to it changes them."""


def unit_of(name: str) -> str:
    """The folder that is brought up to date as one: of a run, else the one that holds the file `name`."""
    run = RUN.match(name)
    return run[0] if run else name.rpartition("/")[0]


def belongs(name: str, unit: str) -> bool:
    """Whether the file `name` in the folder `unit` is of that unit: folders in the folder of a run are, others not."""
    return is_kept(name) and ("/" not in name or RUN.fullmatch(unit) is not None)


def is_kept(name: str) -> bool:
    """Whether a file below the results belongs at the URL."""
    return not LOCAL_ONLY.match(name) and not any(part.startswith(".") for part in name.split("/"))


def is_passing(name: str) -> bool:
    """Whether a file of a run is there only until the run is finished."""
    return name == "progress.json" or name.startswith("state/")


def is_document(name: str) -> bool:
    """Whether a file of a run or a collection is one of those that tables are made of."""
    return name.endswith(".json") and not name.startswith("state/")


def stamp_of(file: Path) -> Stamp | None:
    """None where there is no such file."""
    try:
        facts = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [facts.st_size, facts.st_mtime_ns]


class Index:
    """For each file of a folder: the version at the URL, and the stamp of what is the same here."""

    def __init__(self, results: Path, unit: str) -> None:
        self.unit = unit
        self.folder = folder = results / unit
        self._known: dict[str, tuple[str, Stamp]] = {}
        # Lost or broken, it costs fetching again.
        with suppress(OSError, ValueError, TypeError):
            content = json.loads((folder / FILE).read_text(encoding="utf-8"))
            self._known = {name: (str(tag), list(stamp)) for name, (tag, stamp) in content["files"].items()}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def names(self) -> list[str]:
        return list(self._known)

    def version(self, name: str) -> str | None:
        known = self._known.get(name)
        return known and known[0]

    def is_same(self, name: str, stamp: Stamp | None) -> bool:
        """Whether the file here is what it was when it was last the same as at the URL."""
        known = self._known.get(name)
        return known is not None and known[1] == stamp

    def is_current(self, name: str, tag: str) -> bool:
        """Whether nothing newer than what is or was here is at the URL, and there is something here."""
        return self.version(name) == tag and (self.folder / name).exists()

    def changed(self) -> dict[str, Stamp]:
        """The files here that are not what is at the URL, as far as is known."""
        files = (file for file in self.folder.rglob("*") if file.is_file())
        names = (file.relative_to(self.folder).as_posix() for file in files)
        stamps = ((name, stamp_of(self.folder / name)) for name in names if belongs(name, self.unit))
        return {name: stamp for name, stamp in stamps if stamp is not None and not self.is_same(name, stamp)}

    def dropped(self) -> list[str]:
        """What was removed here since, because a run no longer needs it or a suite was made of another choice."""
        remade = self.unit.startswith(f"{COLLECTIONS}/")
        return [name for name in self._known if (remade or is_passing(name)) and not (self.folder / name).exists()]

    def record(self, name: str, tag: str, stamp: Stamp | None) -> None:
        if stamp is not None:
            self._known[name] = tag, stamp

    def forget(self, name: str) -> None:
        self._known.pop(name, None)

    def save(self) -> None:
        write_json(self.folder / FILE, {"files": self._known})
