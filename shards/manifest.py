"""`manifest.json`: what a packed data set must hold. It is written last, so a folder with one is complete."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shards.errors import DataError

SCHEMA = 2
FILE = "manifest.json"
MIRROR_FILE = "mirror.json"
# Imported few-shot samples, which stay when a data set is packed again.
SAMPLES_FOLDER = "few-shot"


class Shard(BaseModel):
    """One tar file of a split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(description="path inside the data set's folder, e.g. test/0.tar")
    sha256: str
    size: int = Field(ge=0, description="bytes")
    count: int = Field(ge=1, description="images")


class SplitEntry(BaseModel):
    """One split: its number of images, the digest of its list, its shards, and the hashes of index and paths."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(ge=1)
    digest: str = Field(description="first 16 hex digits of SHA-256 over the lines path<TAB>label<TAB>class name")
    index_sha256: str = Field(description="of <split>/index.npy")
    paths_sha256: str = Field(description="of <split>/paths.txt")
    shards: tuple[Shard, ...] = Field(min_length=1)


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
    splits: dict[str, SplitEntry] = Field(min_length=1)

    @property
    def digest(self) -> str:
        """16 hex digits that identify the content of the whole data set."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def lines_digest(lines: Iterable[str]) -> str:
    """Compute the first 16 hex digits of SHA-256 over lines joined by single newlines."""
    digest = hashlib.sha256()
    for number, line in enumerate(lines):
        digest.update(f"\n{line}".encode() if number else line.encode())
    return digest.hexdigest()[:16]


def convention_texts(manifest: Manifest) -> dict[str, str]:
    """Return class names (underscores as blanks) and templates as the text files of the clip-benchmark convention."""
    names = (name.replace("_", " ").strip() for name in manifest.classnames)
    templates = (manifest.template, *manifest.templates)
    return {
        "classnames.txt": "".join(f"{name}\n" for name in names),
        "zeroshot_classification_templates.txt": "".join(f"{line.replace('{}', '{c}')}\n" for line in templates),
    }


def unfit_texts(classnames: Iterable[str], templates: Iterable[str]) -> Iterator[str]:
    """Explain why class names or templates cannot be stored one per line; equal names are allowed."""
    for label, name in enumerate(classnames):
        if not _one_line(name) or not name.replace("_", " ").strip():
            yield f"class name {label} is {name!r}"
    for template in templates:
        if not _one_line(template):
            yield f"the template is {template!r}"
        elif template.count("{}") != 1 or "{" in template.replace("{}", "") or "}" in template.replace("{}", ""):
            yield f"the template {template!r} must hold one {{}} and no other brace"


def _one_line(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return len(text.splitlines()) == 1 and text == text.strip()


def is_mirror(root: Path) -> bool:
    """Whether a data root is the local copy of one behind a URL; `shards.mirror` makes such roots."""
    return (root / MIRROR_FILE).is_file()


def repack_hint(folder: Path) -> str:
    """Explain how to replace a broken data set: pack it again, or delete the copy of a remote one."""
    if is_mirror(folder.parent):
        return f"delete {folder} and it is fetched again"
    from shards.catalogue import find

    name, raw = folder.name, ""
    try:
        raw = " --raw FOLDER" if find(name).source == "folder" and not os.environ.get("PROCAP_RAW") else ""
    except DataError:
        name = f"{name}.yaml"
    return f"pack it again: procap data pack {name}{raw} --force --data {shlex.quote(str(folder.parent))}"


def read_manifest(folder: Path, dataset: str | None = None) -> Manifest:
    """Read and check the manifest of a packed data set, which must be called `dataset` (default: the folder's name)."""
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
    manifest = parse_manifest(text, str(folder / FILE), mend)
    if manifest.dataset != wanted:
        holds = f"{folder} holds the data set '{manifest.dataset}', not '{wanted}'"
        raise DataError(f"{holds}; rename the folder to {manifest.dataset}")
    return manifest


def parse_manifest(text: str, file: str, mend: str) -> Manifest:
    """Parse the manifest in `text`. Raises DataError naming `file` and a remedy if this version cannot read it."""
    try:
        content = json.loads(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA:
            raise DataError(f"{file} has schema {version}, this version reads schema {SCHEMA}; {mend}")
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{file} is damaged ({where}: {first['msg']}); {mend}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged ({error}); {mend}") from None
