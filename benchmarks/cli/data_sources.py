"""Resolve names to what is packed: groups, data sets of the catalogue, derived data sets, and the user's YAML files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent

from benchmarks.cli.flags import PackFlags
from benchmarks.console.output import note, quote
from benchmarks.console.parse import split_names
from procap.errors import UsageError
from shards.builtin_sources import builtin_source
from shards.catalogue import CATALOGUE, GROUPS, PUBLISHED, Dataset, derive_dataset, find
from shards.raw.class_folders import TABLES, find_split_folders
from shards.raw.description import SplitRule, parse_description, read_description
from shards.raw.folders import is_image_name
from shards.raw.guess import find_description
from shards.raw.published import find_folder, raw_source
from shards.raw.user_dataset import user_source
from shards.records import Source
from shards.resolve import resolve_dataset


@dataclass(frozen=True)
class DatasetToPack:
    """One data set to pack: its name, and how to read its list of images.

    location: the YAML file of a user's own images. guessed: the content of a YAML file that is not written yet.
    is_random: whether that file asks for a random split.
    """

    name: str
    source: Callable[[], Source]
    location: str = ""
    guessed: str = ""
    is_random: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the images are the user's own, described by a YAML file."""
        return bool(self.location)


def select_datasets(names: Iterable[str], packing: PackFlags, data_root: Path) -> list[DatasetToPack]:
    """Resolve `names`: each is a data set, a YAML file, a folder of images, or a group (all, world, paper).

    Duplicates are dropped. The YAML file of a folder that has none is guessed, and not written here.
    """
    wanted: dict[str, DatasetToPack] = {}
    for name in (part for text in names for part in ([text] if is_own_folder(text) else split_names(text))):
        for one in _resolve_group(name, packing) if name in GROUPS else [_resolve_name(name, packing, data_root)]:
            if wanted.setdefault(one.name, one).location != one.location:
                raise UsageError(f"{wanted[one.name].location} and {one.location} both describe '{one.name}'")
    if not wanted:
        raise UsageError("no data set is named; for example shapes, or all")
    return list(wanted.values())


def _resolve_group(name: str, packing: PackFlags) -> list[DatasetToPack]:
    drawn = [_from_builtin(dataset) for dataset in CATALOGUE.values() if dataset.source != "folder"]
    root = packing.raw_root()
    if name == "world" or (name == "all" and root is None):
        if packing.changes:
            raise UsageError(f"'{name}' is drawn as it is: random splits, subsets and sizes are for raw folders")
        return drawn
    if root is None:
        raise UsageError("'paper' is packed from raw folders: name the folder that holds them with --raw")
    there = [dataset for dataset in PUBLISHED if find_folder(dataset, root)]
    if not there:
        raise UsageError(
            f"--raw {root} holds none of the published data sets; see: procap data check all --raw {quote(root)}"
        )
    if absent := [dataset.name for dataset in PUBLISHED if dataset not in there]:
        note(f"not in {root}, left out: {', '.join(absent)}")
    return [*(_from_raw_folder(dataset, packing) for dataset in there), *(drawn if name == "all" else ())]


def is_own_folder(name: str) -> bool:
    """Whether a name is a folder of images; a folder called like a data set is written as `./name`."""
    if not Path(name).expanduser().is_dir():
        return False
    try:
        return os.sep in name or name in (".", "..") or not (name in GROUPS or find(name))
    except UsageError:
        return True


def is_own(name: str) -> bool:
    """Whether a name is a folder of images or the YAML file of one."""
    return is_own_folder(name) or name.lower().endswith((".yaml", ".yml"))


def report_note(text: str) -> None:
    """Print a note on a user's images, a warning or a problem."""
    note(f"procap: {text if text.startswith(('problem: ', 'warning: ')) else f'note: {text}'}")


def _from_own_folder(folder: Path, packing: PackFlags) -> DatasetToPack:
    """Take a folder by the YAML file beside it, which is guessed if there is none."""
    if packing.changes:
        raise UsageError(f"{folder} is described by the YAML file beside it: leave out the other flags")
    file, text = find_description(folder)
    if not text:
        note(f"{file} describes {folder}")
    else:
        note(f"guessed for {file}:\n{indent(text.rstrip(), '  ')}")
        beside = [*find_split_folders((above := folder.resolve()).parent).values()]
        if above.name in beside and (others := [name for name in beside if name != above.name]):
            command = f"procap data pack {quote(above.parent)}"
            report_note(f"left out beside {above.name}: {', '.join(others)}; to pack all splits as one set: {command}")
    return dataset_from_file(file, packing, text)


def _resolve_name(name: str, packing: PackFlags, data_root: Path) -> DatasetToPack:
    if is_own_folder(name):
        return _from_own_folder(Path(name).expanduser(), packing)
    if name.lower().endswith((".yaml", ".yml")):
        return dataset_from_file(Path(name).expanduser(), packing)
    try:
        dataset = resolve_dataset(name, data_root)
    except UsageError as error:
        if (file := Path(name).expanduser()).is_file():
            # An image lies in the folder of its class.
            folder = file.parent.parent if is_image_name(file.name) else file.parent
            table = f", or a YAML file with table: {file.name}" if file.suffix.lower() in TABLES else ""
            command = f"procap data pack {quote(folder)}{table}"
            raise UsageError(f"{name} is a file; pack the folder of the data set: {command}") from None
        if os.sep in name:
            hint = "name a folder of images, a YAML file, or a data set"
            raise UsageError(f"there is no folder {name}; {hint}") from None
        near = difflib.get_close_matches(name, [path.name for path in Path().iterdir() if path.is_dir()], 1)
        raise UsageError(f"there is no folder {name!r} here{f', but {near[0]!r}' if near else ''}; {error}") from None
    if dataset.source == "packed":
        raise UsageError(f"'{dataset.name}' was packed from a YAML file: name that file instead")
    if dataset.source == "folder":
        return _from_raw_folder(find(name), packing)
    # Raises UsageError for changes to a drawn data set.
    derive_dataset(dataset, packing.random_split, packing.subset, packing.resize)
    return _from_builtin(dataset)


def _from_builtin(dataset: Dataset) -> DatasetToPack:
    return DatasetToPack(dataset.name, lambda: builtin_source(dataset))


def dataset_from_file(file: Path, packing: PackFlags, text: str = "") -> DatasetToPack:
    """Take the data set of a YAML file, or of its `text` if it is not written."""
    if packing.changes:
        raise UsageError(f"{file} describes its own split and source: leave out the other flags")
    if not text and not file.is_file():
        raise UsageError(f"there is no file {file}; name the YAML file of a data set, or the folder of the images")
    own = parse_description(text, file) if text else read_description(file)
    source, is_random = partial(user_source, file, text), isinstance(own.split, SplitRule)
    return DatasetToPack(own.name, source, location=str(file), guessed=text, is_random=is_random)


def _from_raw_folder(dataset: Dataset, packing: PackFlags) -> DatasetToPack:
    """Take a published data set from its raw folder, changed as its name or the flags say."""
    if dataset.variant and packing.changes:
        raise UsageError(f"'{dataset.name}' and the flags describe two data sets: leave out the flags")
    derived = derive_dataset(dataset, packing.random_split, packing.subset, packing.resize)
    root = packing.raw_root()
    if root is None:
        folder = derived.raw.folders[0] if derived.raw else derived.base
        where = f"name the folder that holds {folder}/ with --raw, or set $PROCAP_RAW"
        raise UsageError(f"'{derived.name}' is packed from raw files: {where}")
    return DatasetToPack(derived.name, partial(raw_source, derived, root))
