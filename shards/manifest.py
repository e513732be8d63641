"""`manifest.json`: what a packed data set must hold. It is written last, so a folder with one is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shards.errors import DataError

SCHEMA = 1
FILE = "manifest.json"


class Shard(BaseModel):
    """One tar file of a split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(description="path inside the data set's folder, e.g. test/0.tar")
    sha256: str
    size: int = Field(ge=0, description="bytes")
    count: int = Field(ge=1, description="images")


class SplitEntry(BaseModel):
    """One split: its images, the digest of its list, its shards and the index that says where each image lies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(ge=1)
    digest: str = Field(description="first 16 hex digits of SHA-256 over the lines path<TAB>label<TAB>class name")
    index_sha256: str
    shards: tuple[Shard, ...]


class Manifest(BaseModel):
    """A packed data set as data; two packings of the same images have the same manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA
    dataset: str
    source: str
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    variant: str = Field(default="", description="how it differs from the published set; empty: it is that set")
    resize: int | None = Field(default=None, description="pixels that the shorter side of larger images was brought to")
    splits: dict[str, SplitEntry]

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the content of the whole data set."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def lines_digest(lines: Iterable[str]) -> str:
    """First 16 hex digits of SHA-256 over lines joined by single newlines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_text(file: Path, text: str) -> None:
    """Write a whole file or nothing of it."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def convention_texts(manifest: Manifest) -> dict[str, str]:
    """The text files of the clip-benchmark convention by name; its templates say `{c}` where ours say `{}`."""
    templates = (manifest.template, *manifest.templates)
    return {
        "classnames.txt": "".join(f"{name}\n" for name in manifest.classnames),
        "zeroshot_classification_templates.txt": "".join(f"{line.replace('{}', '{c}')}\n" for line in templates),
    }


def repack_hint(folder: Path) -> str:
    return f"pack it again: procap data pack {folder.name} --force --data {folder.parent}"


def read_manifest(folder: Path, dataset: str | None = None) -> Manifest:
    """The manifest of a packed data set; `dataset` is the name it must have (default: the folder's).

    Raises DataError when there is none, when it is not readable by this version, or when it is another data set's.
    """
    wanted = dataset or folder.name
    mend = repack_hint(folder.with_name(wanted))
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        state = f"it has no {FILE}" if folder.is_dir() else "there is no such folder"
        pack = f"pack them: procap data pack {wanted} --data {folder.parent}"
        raise DataError(f"no shards of '{wanted}' in {folder} ({state}); {pack}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / FILE} cannot be read ({error}); {mend}") from None
    try:
        content = json.loads(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA:
            raise DataError(f"{folder / FILE} has schema {version}, this version reads schema {SCHEMA}; {mend}")
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{folder / FILE} is damaged ({where}: {first['msg']}); {mend}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{folder / FILE} is damaged ({error}); {mend}") from None
    if manifest.dataset != wanted:
        holds = f"{folder} holds the data set '{manifest.dataset}', not '{wanted}'"
        raise DataError(f"{holds}; rename the folder to {manifest.dataset}")
    return manifest
