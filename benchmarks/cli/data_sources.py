"""Resolve names to what is packed: groups, data sets of the catalogue, and the user's folders and YAML files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent

from benchmarks.console.output import columns, note, note_failures, quote, show, show_json
from benchmarks.console.parse import expand_datasets, split_names
from procap.errors import UsageError
from shards.builtin_sources import builtin_source
from shards.catalogue import GROUPS, PUBLISHED, Dataset, find, find_or_none
from shards.default_paths import data_root
from shards.manifest import MANIFEST_FILE, Manifest
from shards.mirror import refuse_packing
from shards.raw.description import read_description
from shards.raw.folders import is_image_name
from shards.raw.guess import find_description_file
from shards.raw.published import find_folder, published_source
from shards.raw.user_dataset import user_source
from shards.resolve import resolve_dataset
from shards.source import Source


@dataclass(frozen=True)
class DatasetToPack:
    """One data set to pack: its name, and how to read its list of images.

    yaml_file: of a user's images. guessed_yaml: the content of a YAML file that is not written yet.
    """

    name: str
    read_source: Callable[..., Source]
    yaml_file: str = ""
    guessed_yaml: str = ""


def select_datasets(
    names: Iterable[str], raw: Path | None, root: Path, max_side: int | None = None
) -> list[DatasetToPack]:
    """Resolve `names`: each is a data set, a YAML file, a folder of images, or a group (all, paper, unlabelled).

    raw: the folder of raw data sets. The YAML file of a folder that has none is guessed, and not written here.
    max_side: for that file, see `find_description_file`.
    """
    selected: dict[str, DatasetToPack] = {}
    for text in names:
        # The path of a folder or a YAML file may have commas.
        for name in [text] if is_user_folder(text) or Path(text).expanduser().is_file() else split_names(text):
            members = [dataset.name for dataset in GROUPS.get(name.lower(), ())] or [name]
            group = _resolve_paper(raw) if name.lower() == "paper" else members
            for dataset in (_resolve_name(member, raw, root, max_side) for member in group):
                first = selected.setdefault(dataset.name, dataset)
                if first.yaml_file != dataset.yaml_file:
                    raise UsageError(f"{first.yaml_file} and {dataset.yaml_file} both describe '{dataset.name}'")
    if not selected:
        raise UsageError("no data set is named; for example shapes, or all")
    return list(selected.values())


def _resolve_paper(raw: Path | None) -> list[str]:
    """List the published sets whose folders lie in `raw`, and print which are left out."""
    if raw is None:
        raise UsageError("'paper' is packed from raw folders: name the folder that holds them with --raw")
    present = [dataset for dataset in PUBLISHED if find_folder(dataset, raw)]
    if not present:
        raise UsageError(
            f"--raw {raw} holds none of the published data sets; download and pack them: procap data fetch paper"
        )
    if absent := [dataset.name for dataset in PUBLISHED if dataset not in present]:
        note(f"not in {raw}, left out: {', '.join(absent)}")
    return [dataset.name for dataset in present]


def is_user_folder(name: str) -> bool:
    """Whether a name is a folder of images; a folder called like a data set is written as `./name`."""
    if not Path(name).expanduser().is_dir():
        return False
    return os.sep in name or name in (".", "..") or not (name.lower() in GROUPS or find_or_none(name))


def report_note(text: str) -> None:
    """Print a note on a user's images, a warning or a problem."""
    note(f"procap: {text if text.startswith(('problem: ', 'warning: ')) else f'note: {text}'}")


def _resolve_name(name: str, raw: Path | None, root: Path, max_side: int | None) -> DatasetToPack:
    path = Path(name).expanduser()
    if is_user_folder(name):
        # By the YAML file next to the folder, which is guessed if there is none.
        file, text = find_description_file(path, max_side)
        note(f"guessed for {file}:\n{indent(text.rstrip(), '  ')}" if text else f"{file} describes {path}")
    elif max_side is not None:
        raise UsageError(f"--max-side is for folders of images, not for '{name}': a YAML file has the line max_side")
    elif name.lower().endswith((".yaml", ".yml")):
        file, text = path, ""
    else:
        return _find_in_catalogue(name, raw, root)
    return DatasetToPack(read_description(file, text).name, partial(user_source, file, text), str(file), text)


def _find_in_catalogue(name: str, raw: Path | None, root: Path) -> DatasetToPack:
    path = Path(name).expanduser()
    if os.sep in name or is_image_name(name) or path.is_file():
        what = f"{name} is no folder" if path.exists() else f"there is no folder {name}"
        raise UsageError(f"{what}: name a folder of images, a YAML file or a data set")
    dataset = resolve_dataset(name, root)
    if path.is_dir() and not raw and not (path / MANIFEST_FILE).exists():
        note(f"procap: warning: '{name}' is taken for the data set of that name; pack the folder here as ./{name}")
    if dataset.images_from == "own":
        raise UsageError(f"'{dataset.name}' was packed from a YAML file: name that file instead")
    if dataset.images_from != "published":
        return DatasetToPack(dataset.name, partial(builtin_source, dataset))
    if raw is None:
        folder = dataset.raw.folders[0] if dataset.raw else dataset.name
        hint = f"name the folder that holds {folder}/ with --raw, or set $PROCAP_RAW"
        raise UsageError(f"'{dataset.name}' is packed from raw files: {hint}")
    return DatasetToPack(dataset.name, partial(published_source, dataset, raw))


def select_published(names: Sequence[str]) -> list[Dataset]:
    """Find published data sets by name; "paper" is all but ImageNet, which is named by itself."""
    text = ",".join(names)
    selected = {dataset.name: dataset for dataset in map(find, expand_datasets(text))}
    if "imagenet" in selected and not any(find_or_none(name) is selected["imagenet"] for name in split_names(text)):
        del selected["imagenet"]
        note("imagenet is left out; with your account of the Hub: procap data fetch imagenet")
    if generated := [name for name, dataset in selected.items() if dataset.images_from != "published"]:
        raise UsageError(f"'{generated[0]}' has no raw folder: procap data pack {generated[0]} makes it")
    return list(selected.values())


def packing_root(data: str) -> Path:
    """Return the folder that `--data` names, for commands that pack. Raises UsageError for a URL."""
    root = data_root(data)
    refuse_packing(root)
    return root


def report_packed(packed: Mapping[str, Manifest], failed: Mapping[str, str], root: Path) -> int:
    """Print what was packed and what was not; return the exit code."""
    rows = []
    for name, manifest in packed.items():
        shards = sum(len(split.shards) for split in manifest.splits.values())
        rows.append((name, len(manifest.classnames), manifest.images, shards, manifest.digest))
    if rows:
        show(columns(("data set", "classes", "images", "shards", "digest"), rows))
        name, manifest = next(iter(packed.items()))
        dataset = name if root == data_root() else f"{name} --data {quote(root)}"
        how = f"--methods procap --datasets {dataset}"
        if not find_or_none(name):
            # The default for the user's own images is a probe.
            how = f"--datasets {dataset} --shots full --classes all"
        train = f"; procap train {how}" if "train" in manifest.splits else ""
        note(f"packed in {root}\nnext: procap data show {dataset}{train}")
    code = note_failures(len(packed), failed)
    digests = {name: manifest.digest for name, manifest in packed.items()}
    show_json({"data": str(root), "datasets": digests, "failed": failed})
    return code
