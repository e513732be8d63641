"""Data sets of one's own: class folders, a table or shards, described by a short YAML file, as a source for packing.

Labels: numbers are taken as given, 0..C-1; text is sorted by code point, unless `classes` lists another order. Paths in
the sheet are relative to it. Images are packed in the order of the table, or of folders by label and name.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shards.errors import DataError
from shards.manifest import unfit_texts
from shards.raw.folders import FolderPart, Listing, Rows, file_sizes, there
from shards.raw.ownlists import SPLITS, Item, first_few, read_table, scan_folders
from shards.raw.sheet import Sheet, SplitRule, read_sheet
from shards.records import Source


def own_source(sheet: Path, cache: Path | None = None) -> Source:
    """The data set that a YAML sheet describes.

    cache: where shards from a URL are kept until they are packed; beside the sheet by default. Raises DataError, in one
    line that names the sheet, for a mistake in it and for images that are not as it says.
    """
    described = read_sheet(sheet)
    try:
        if described.shards is not None:
            return _shards(sheet, described, cache or sheet.parent)
        return _images(sheet, described)
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(str(sheet)) else f"{sheet}: {message}") from None


def _images(file: Path, sheet: Sheet) -> Source:
    if sheet.table is not None:
        root, kind = _beside(file, sheet.images or "."), "table"
        items = read_table(_beside(file, sheet.table))
        _refuse_missing(root, items)
    else:
        root, kind = _beside(file, sheet.folder or ""), "folders"
        items = scan_folders(root)
    classes = _classes(sheet, items)
    if kind == "folders":
        items.sort(key=lambda item: classes.labels[item.label])
    items = _split(sheet, items, classes)
    _refuse_empty(items, classes)
    splits = {
        split: Rows([item.path for item in part], [classes.labels[item.label] for item in part])
        for split in SPLITS
        if (part := [item for item in items if item.split == split])
    }
    listing = Listing(root, classes.names, splits, f"own {kind}", scanned=True)
    sizes = list(file_sizes(root, [path for rows in splits.values() for path in rows.paths]))
    return Source(
        name=sheet.name,
        classnames=classes.names,
        template=sheet.template,
        templates=sheet.prompts,
        # An image that was replaced under its name is told by its size: no other version of one's own data is known.
        origin=f"{listing.origin}, lists {listing.digest()}, sizes {_digest(sizes)}",
        counts={split: len(rows) for split, rows in splits.items()},
        part=partial(_part, root, splits),
        size=sum(sizes),
    )


def _digest(sizes: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, sizes)).encode()).hexdigest()[:16]


def _part(root: Path, splits: Mapping[str, Rows], split: str, start: int, stop: int) -> FolderPart:
    rows = splits[split]
    return FolderPart(root, tuple(rows.paths[start:stop]), tuple(rows.labels[start:stop]))


def _shards(file: Path, sheet: Sheet, cache: Path) -> Source:
    from shards.raw.tars import tar_source
    from shards.urls import is_url, redact

    location = sheet.shards or ""
    assert not isinstance(sheet.classes, dict)
    source = tar_source(
        sheet.name,
        location if is_url(location) else str(_beside(file, location)),
        splits=None if sheet.splits is None else dict(sheet.splits.items()),
        classnames=sheet.classes,
        template=sheet.template,
        templates=sheet.prompts,
        origin=f"own shards {redact(location)}",
        cache=cache,
    )
    if "test" not in source.counts:
        raise DataError(f"shards: {location} has no test images; splits: {{test: FOLDER}} says where they are")
    return source


def _beside(file: Path, path: str) -> Path:
    try:
        return file.parent / Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path}: there is no user of that name; write the whole path") from None


def _refuse_missing(root: Path, items: Sequence[Item]) -> None:
    missing = [item.path for item, here in zip(items, there(root, [i.path for i in items]), strict=True) if not here]
    if missing:
        raise DataError(f"table: {len(missing):,} of {len(items):,} images are not in {root}: {first_few(missing)}")


@dataclass(frozen=True)
class _Classes:
    """Class names in label order, and the label of what the data call a class."""

    names: tuple[str, ...]
    labels: Mapping[str | int, int]


def _classes(sheet: Sheet, items: Sequence[Item]) -> _Classes:
    raw = list(dict.fromkeys(item.label for item in items))
    texts = {label for label in raw if isinstance(label, str)}
    if texts and len(texts) < len(raw):
        raise DataError(f"labels are text ({first_few(sorted(texts))}) and numbers: they must be all of one kind")
    classes = _named(sheet.classes, sorted(texts)) if texts else _numbered(sheet.classes, items)
    for reason in unfit_texts(classes.names, ()):
        raise DataError(f"{reason}: a name is one line without blanks around it")
    return classes


def _named(given: Sequence[str] | Mapping[str | int, str] | None, found: Sequence[str]) -> _Classes:
    """Classes whose labels are text: the names of their folders, or words in a table."""
    order = [str(key) for key in (found if given is None else given)]
    twice = [name for name, count in Counter(order).items() if count > 1]
    if twice:
        raise DataError(f"classes: {first_few(twice)} is there twice")
    for name in found:
        if name not in order:
            near = difflib.get_close_matches(name, order, n=1, cutoff=0.6)
            hint = f"; is it meant by {near[0]!r}?" if near else ""
            raise DataError(f"classes: {name!r} has images and is not there{hint}")
    empty = [name for name in order if name not in found]
    if empty:
        raise DataError(f"classes: {first_few(empty)} has no images")
    if isinstance(given, Mapping):
        named = {str(key): name for key, name in given.items()}
        order = sorted(order)
        names = tuple(named[key] for key in order)
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise DataError(f"classes: two labels are called {first_few(twice)}: nothing could tell them apart")
        return _Classes(names, {key: label for label, key in enumerate(order)})
    return _Classes(tuple(order), {name: label for label, name in enumerate(order)})


def _numbered(given: Sequence[str] | Mapping[str | int, str] | None, items: Sequence[Item]) -> _Classes:
    """Classes whose labels are numbers, which must be 0..C-1; names come from the sheet or from CoOp's lists."""
    found = {int(item.label) for item in items}
    names: dict[int, str] = {}
    if given is None:
        for item in items:
            label = int(item.label)
            if not item.classname:
                raise DataError(f"labels are numbers (0 to {max(found)}) without names: list them under classes")
            if names.setdefault(label, item.classname) != item.classname:
                raise DataError(f"table: label {label} is called {names[label]!r} and {item.classname!r}")
    elif isinstance(given, Mapping):
        wrong = [key for key in given if not isinstance(key, int)]
        if wrong:
            raise DataError(f"classes: labels are numbers, and {wrong[0]!r} is none")
        names = {int(key): name for key, name in given.items()}
    else:
        names = dict(enumerate(given))
    unnamed = sorted(found - set(names))
    if unnamed:
        raise DataError(f"classes: label {unnamed[0]} has images and no name ({len(names)} names are there)")
    count = len(names)
    absent = next((label for label in range(count) if label not in found), None)
    if absent is not None:
        called = f" ({names[absent]!r})" if absent in names else ""
        raise DataError(f"no image has label {absent}{called}: labels are 0 to C - 1 without a gap")
    return _Classes(tuple(names[label] for label in range(count)), {label: label for label in range(count)})


def _split(sheet: Sheet, items: list[Item], classes: _Classes) -> list[Item]:
    """The items with their splits, by what the data say or else by the sheet."""
    said = {item.split for item in items}
    if said == {""}:
        if sheet.split is None:
            raise DataError(
                "the data do not say what is for training: add split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}, "
                "or split: test where all images are for testing"
            )
        if sheet.split == "test":
            return [replace(item, split="test") for item in items]
        assert isinstance(sheet.split, SplitRule)
        return list(_drawn(sheet.split, items, classes))
    if "" in said:
        unsaid = next(item.path for item in items if not item.split)
        raise DataError(f"table: {unsaid!r} has no split, and others have one")
    if sheet.split is not None:
        raise DataError(
            f"split: the data say it themselves ({', '.join(s for s in SPLITS if s in said)}): leave it out"
        )
    return items


def _drawn(rule: SplitRule, items: Sequence[Item], classes: _Classes) -> Iterator[Item]:
    """Per class, in label order: names sorted and shuffled, then cut; one random stream of its own for all."""
    draw = random.Random(rule.seed)
    by_class: dict[int, list[Item]] = {label: [] for label in range(len(classes.names))}
    for item in items:
        by_class[classes.labels[item.label]].append(item)
    for label, part in by_class.items():
        part.sort(key=lambda item: item.path)
        draw.shuffle(part)
        train = round(rule.train * len(part))
        val = train + (round(rule.val * len(part)) if rule.val else 0)
        parts = {"train": part[:train], "val": part[train:val], "test": part[val:]}
        empty = [split for split in SPLITS if not parts[split] and (split != "val" or rule.val)]
        if empty:
            few = f"class {classes.names[label]!r} has {len(part)} image{'s' * (len(part) > 1)}"
            raise DataError(f"split: {few}, too few for {' and '.join(empty)}: add images, or change the fractions")
        for split, chosen in parts.items():
            yield from (replace(item, split=split) for item in chosen)


def _refuse_empty(items: Sequence[Item], classes: _Classes) -> None:
    """Every class is trained on, where anything is, and tested."""
    there = {split: {item.label for item in items if item.split == split} for split in SPLITS}
    if not there["test"]:
        raise DataError("there are no test images: nothing could be evaluated")
    if there["val"] and not there["train"]:
        raise DataError("there are val images and no train images")
    for split in ("train", "test"):
        for key, label in classes.labels.items():
            if there[split] and key not in there[split]:
                raise DataError(f"class {classes.names[label]!r} has no {split} image")
