"""Few-shot picks as data: which images of a packed set a run trains on, drawn by CoOp's rule or brought from elsewhere.

Picks name images by their paths in the data set, in drawn order, over all classes; halves are taken from them as from a
draw. Imported ones are kept beside the shards, in `<data>/<name>/picks/<digest>.json`, and are no part of the manifest.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shards.errors import DataError, DataUsageError
from shards.fewshot import check_shots, few_shot
from shards.manifest import lines_digest, write_text
from shards.pack_lock import PICKS
from shards.reader import ShardSet

SCHEMA: Literal[1] = 1
DIGEST = re.compile(r"[0-9a-f]{16}")

PickSource = Literal["coop-rule", "imported"]


@dataclass(frozen=True)
class FewShotSamples:
    """Paths of the picked training and validation images, in drawn order; `val` is empty where a set has none."""

    dataset: str
    shots: int
    seed: int
    source: PickSource
    train: tuple[str, ...]
    val: tuple[str, ...]

    @property
    def digest(self) -> str:
        """First 16 hex digits of SHA-256 over the training paths, one per line, in drawn order."""
        return lines_digest(self.train)

    @property
    def val_digest(self) -> str:
        return lines_digest(self.val)

    def same_images(self, other: FewShotSamples) -> bool:
        """Whether both hold the same images in the same order, whoever chose them."""
        return (self.train, self.val) == (other.train, other.val)


@dataclass(frozen=True)
class Listed:
    """The images of a split by position: paths and labels [N]. Nothing of the images themselves is read."""

    paths: Sequence[str]
    labels: NDArray[np.int64]


def listed(shards: ShardSet, split: str) -> Listed:
    """The list of a split; an empty one where the set has no such split."""
    if split not in shards.manifest.splits:
        return Listed([], np.zeros(0, np.int64))
    return Listed(shards.paths(split), shards.labels(split))


def drawn(shards: ShardSet, shots: int, seed: int) -> FewShotSamples:
    """The picks that CoOp's rule draws from a packed data set.

    Raises DataUsageError for a test-only set, and for fewer than one or more shots than the largest class has.
    """
    check_shots(shards, shots)
    train, val = listed(shards, "train"), listed(shards, "val")
    if shots == 0:
        raise DataUsageError("--shots 0 takes every image: there is nothing to pick")
    of_train, of_val = few_shot(train.labels, val.labels, shots, seed)
    return FewShotSamples(
        shards.name,
        shots,
        seed,
        "coop-rule",
        tuple(train.paths[i] for i in of_train),
        tuple(val.paths[i] for i in of_val),
    )


def _plain_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(paths)) != len(paths):
        raise ValueError("an image is named twice")
    if any(not path or not path.isprintable() for path in paths):
        raise ValueError("a path is empty or holds line breaks")
    return paths


_Paths = Annotated[tuple[str, ...], AfterValidator(_plain_paths)]


class _Document(BaseModel):
    """The JSON of picks; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    picks_schema: Literal[1]
    dataset: str
    shots: int = Field(ge=1)
    seed: int = Field(ge=0)
    source: PickSource
    digest: str
    train: _Paths = Field(min_length=1)
    val: _Paths


def as_json(picks: FewShotSamples) -> str:
    plain = {"picks_schema": SCHEMA, "digest": picks.digest, **asdict(picks)}
    return json.dumps({name: plain[name] for name in _Document.model_fields}, indent=1, ensure_ascii=False) + "\n"


def write_picks(file: Path, picks: FewShotSamples) -> None:
    """Write picks as JSON, the whole file or nothing. Raises DataError when it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, as_json(picks))
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror or error}") from None


def read_picks(file: Path) -> FewShotSamples:
    """Read what `write_picks` wrote. Raises DataError for anything else, altered content included."""
    try:
        document = _Document.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(
            f"{file} holds no picks as `procap data few-shot --out` writes them ({where}: {first['msg']})"
        ) from None
    picks = FewShotSamples(**{field.name: getattr(document, field.name) for field in fields(FewShotSamples)})
    if picks.digest != document.digest:
        raise DataError(f"{file} was altered: its paths have digest {picks.digest}, not {document.digest}")
    return picks


def kept_file(folder: Path, digest: str) -> Path:
    """Where the imported picks of the data set in `folder` are kept."""
    return folder / PICKS / f"{digest}.json"


def keep(folder: Path, picks: FewShotSamples) -> Path:
    """Keep picks beside the shards in `folder`; gives the file. Raises DataError when others have the same digest."""
    file = kept_file(folder, picks.digest)
    there = read_picks(file) if file.exists() else None
    if there and not picks.same_images(there):
        raise DataError(f"{file} holds the same training images and other validation images: remove it first")
    # The same images under another seed or source: what was said last is right.
    if there != picks:
        write_picks(file, picks)
    return file


def kept(folder: Path, digest: str) -> FewShotSamples:
    """Picks that were kept beside the shards in `folder`. Raises DataError where they are not there or altered."""
    file = kept_file(folder, digest)
    if not DIGEST.fullmatch(digest) or not file.is_file():
        there = sorted(found.stem for found in (folder / PICKS).glob("*.json"))
        raise DataError(
            f"no picks {digest} of '{folder.name}' in {file.parent} (it holds: {', '.join(there) or 'none'}); "
            f"import them: procap data few-shot {folder.name} --import FILE --data {shlex.quote(str(folder.parent))}"
        )
    picks = read_picks(file)
    if picks.digest != digest:
        raise DataError(f"{file} was renamed: it holds the picks {picks.digest}")
    return picks
