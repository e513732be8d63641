"""`manifest.json`: what a packed data set must hold. It is written last, so a folder with one is complete."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from procap.errors import UserError, describe_invalid
from shards.files import read_regular
from shards.names import NAME, unfit_texts

MANIFEST_FILE = "manifest.json"
MIRROR_FILE = "mirror.json"
UPRIGHT = "EXIF orientation applied"
"""Part of the source of data sets whose images are turned upright when they are decoded, as those of CoOp are not."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ManifestPart(BaseModel):
    """A part of the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(ManifestPart):
    """One tar file of a split."""

    file: str = Field(description="<split>/<number>.tar", pattern=rf"^{NAME.pattern}/[0-9]{{1,9}}\.tar$")
    sha256: Sha256
    size: int = Field(ge=0, lt=2**63, description="bytes")
    count: int = Field(ge=1, description="images")


class SplitEntry(ManifestPart):
    """One split: its number of images, the digest of its list, its shards, and the hashes of index and paths."""

    count: int = Field(ge=1, lt=2**40)
    digest: str = Field(
        pattern="^[0-9a-f]{16}$",
        description="first 16 hex digits of SHA-256 over the lines path<TAB>label<TAB>class name",
    )
    index_sha256: Sha256 = Field(description="of <split>/index.npy")
    paths_sha256: Sha256 = Field(description="of <split>/paths.txt")
    shards: tuple[Shard, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_count(self) -> SplitEntry:
        if (total := sum(shard.count for shard in self.shards)) != self.count:
            raise ValueError(f"count is {self.count}, and its shards have {total} images")
        return self


class Manifest(ManifestPart):
    """A packed data set as data; two packings of the same images have the same manifest."""

    schema_version: Literal[2] = 2
    dataset: str = Field(pattern=f"^{NAME.pattern}$")
    source: str = Field(description="`origin` of the `Source` that was packed")
    classnames: tuple[str, ...] = Field(min_length=1)
    template: str
    templates: tuple[str, ...]
    splits: dict[Annotated[str, Field(pattern=f"^{NAME.pattern}$")], SplitEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> Manifest:
        """Refuse texts that break a line or a terminal."""
        if reason := next(unfit_texts(self.classnames, (self.template, *self.templates)), ""):
            raise ValueError(reason)
        return self

    @property
    def counts(self) -> dict[str, int]:
        """Images of each split."""
        return {name: split.count for name, split in self.splits.items()}

    @property
    def upright(self) -> bool:
        """Whether images are turned as their EXIF orientation says."""
        return UPRIGHT in self.source

    @property
    def images(self) -> int:
        return sum(self.counts.values())

    @property
    def digest(self) -> str:
        """16 hex digits that identify the content of the whole data set."""
        # Of the fields and not of the file, so that white space in it does not count.
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def lines_digest(lines: Iterable[str]) -> str:
    """Compute the first 16 hex digits of SHA-256 over lines joined by single newlines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def convention_texts(manifest: Manifest) -> dict[str, str]:
    """Return the text files of the clip-benchmark convention; class names have blanks for underscores."""
    names = (name.replace("_", " ").strip() for name in manifest.classnames)
    templates = (manifest.template, *manifest.templates)
    return {
        "classnames.txt": "".join(f"{name}\n" for name in names),
        # CLIP_benchmark fills {c} with the class name.
        "zeroshot_classification_templates.txt": "".join(f"{line.replace('{}', '{c}')}\n" for line in templates),
        **{f"{split}/nshards.txt": f"{len(entry.shards)}\n" for split, entry in manifest.splits.items()},
    }


def is_mirror(root: Path) -> bool:
    """Whether a data root is the local copy of one behind a URL; `shards.mirror` makes such roots."""
    return (root / MIRROR_FILE).is_file()


def repack_hint(folder: Path) -> str:
    """Explain how to replace a broken data set: pack it again, or delete the copy of a remote one."""
    if is_mirror(folder.parent):
        return f"delete {folder} and it is fetched again"
    return f"pack it again: procap data pack {folder.name} --force --data {shlex.quote(str(folder.parent))}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the packed data set in `folder`, which must be called like the folder."""
    file, remedy = folder / MANIFEST_FILE, repack_hint(folder)
    try:
        text = read_regular(file).decode()
    except FileNotFoundError:
        state = f"it has no {MANIFEST_FILE}" if folder.is_dir() else "there is no such folder"
        remedy = f"procap data pack {folder.name} --data {shlex.quote(str(folder.parent))}"
        raise UserError(f"no shards of '{folder.name}' in {folder} ({state}); pack them: {remedy}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file} cannot be read ({reason}); {remedy}") from None
    return parse_manifest(text, str(file), folder.name, remedy)


def parse_manifest(text: str, file: str, name: str, remedy: str) -> Manifest:
    """Parse the manifest of the data set `name`. Raises UserError naming `file` and a remedy."""
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"{file} is damaged ({describe_invalid(error, root='')}); {remedy}") from None
    if manifest.dataset != name:
        raise UserError(f"{file} holds the data set '{manifest.dataset}', not '{name}'; rename its folder, or {remedy}")
    return manifest
