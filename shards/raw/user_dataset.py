"""Read data sets of a user: class folders, a table or shards, described by a short YAML file.

Labels: numbers are taken as given, 0..C-1; text is sorted by code point, unless `classes` lists another order. Paths in
the YAML file are relative to it. Images are packed in the order of the table, or of folders by label and name. Names on
the disk and in tables are untrusted; paths must stay inside the folder of the images, and links are followed.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
import os
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, zip_longest
from pathlib import Path

from shards.errors import DataError
from shards.files import require_regular
from shards.names import Finding, first_few, unfit_texts, unsafe_path
from shards.raw.class_folders import ImageList, ListedImage, scan_folders
from shards.raw.description import Description, parse_description, read_description
from shards.raw.folders import Images, Listing, file_sizes, is_image_name, list_folder, missing_files
from shards.raw.lists import SPLITS, parse_split_lists
from shards.raw.random_split import split_classes, split_sizes
from shards.records import Source

COLUMNS = ("path", "label", "split")
UNEQUAL = 10
"""How many times as many images the largest class has if a note says so."""
RARE = 4
"""How many times fewer images a class has than the one whose name it may be a misspelling of."""
MOST_RARE = 50
"""Classes that are compared with all others."""
SIMILARITY = 0.8
AGREEMENT = 0.9
"""The share of images whose folder is called like their label, from which the others are likely mistakes."""


def user_source(file: Path, cache: Path | None = None, text: str = "") -> Source:
    """Make a source of the data set that a YAML file describes; shards from a URL are kept in `cache` until packed.

    text: the content of a file that is not written yet. What is wrong in single images or classes are its `problems`.
    """
    description = parse_description(text, file) if text else read_description(file)
    try:
        if description.shards is not None:
            return _shard_source(file, description, cache or file.parent)
        return _image_source(file, description)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def _shard_source(file: Path, description: Description, cache: Path) -> Source:
    from shards.raw.tars import tar_source
    from shards.urls import is_url, redact

    location = description.shards or ""
    assert not isinstance(description.classes, dict)
    source = tar_source(
        description.name,
        location if is_url(location) else str(_resolve(file, location)),
        splits=None if description.splits is None else dict(description.splits.items()),
        classnames=description.classes,
        template=description.template,
        templates=description.prompts,
        origin=f"own shards {redact(location)}",
        cache=cache,
    )
    if "test" not in source.counts:
        raise DataError(f"shards: {location} has no test images; splits: {{test: FOLDER}} says where they are")
    return source


def _image_source(file: Path, description: Description) -> Source:
    if description.table is not None:
        root, kind = _resolve(file, description.images or "."), "table"
        items = read_table(_resolve(file, description.table))
        if missing := missing_files(root, [item.path for item in items]):
            what = f"table: {len(missing):,} of {len(items):,} images are not in {root}"
            raise DataError(f"{what}: {first_few(missing)}")
        found = ImageList(items, notes=compare_table(root, items))
    else:
        root, kind = _resolve(file, description.folder or ""), "folders"
        found = scan_folders(root, dict((description.splits or {}).items()), description.folder or "")
    items = found.items
    names, labels = _number_classes(description, items)
    if kind == "folders":
        items.sort(key=lambda item: labels[item.label])
    splits, problems = _assign_splits(description, items, names, labels)
    listing = Listing(root, names, splits, f"own {kind}", scanned=True)
    counts = Counter(names[labels[item.label]] for item in items)
    sizes = file_sizes(root, listing.paths)
    # A user's data has no version; the sizes detect most images that were replaced under the same name.
    sizes_digest = hashlib.sha256(" ".join(map(str, sizes)).encode()).hexdigest()[:16]
    return Source(
        name=description.name,
        classnames=names,
        template=description.template,
        templates=description.prompts,
        origin=f"{listing.origin}, lists {listing.digest()}, sizes {sizes_digest}",
        counts=listing.counts,
        part=listing.part,
        size=sum(sizes),
        problems=(*found.problems, *problems),
        notes=(*found.notes, *describe_classes(counts)),
    )


def _resolve(file: Path, path: str) -> Path:
    return file.parent / os.path.expanduser(path)


def read_table(file: Path) -> list[ListedImage]:
    """Read the rows of a table in order: CSV with a header, or JSON of rows or of CoOp's train, val and test lists."""
    try:
        require_regular(file)
        text = file.read_text(encoding="utf-8-sig")
        readers = {".csv": _read_csv, ".json": _read_json}
        if file.suffix.lower() not in readers:
            raise ValueError("it is neither .csv nor .json")
        items = list(readers[file.suffix.lower()](text))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise DataError(f"table: {file} cannot be read: {reason}") from None
    if not items:
        raise DataError(f"table: {file} lists no images")
    # An image that is listed twice could be in the training and the test split, or have two labels.
    if repeated := _repeated(item.path for item in items):
        raise DataError(f"table: {file} lists {first_few(repeated)} more than once: list each image once")
    return items


def _read_csv(text: str) -> Iterator[ListedImage]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [name.strip() for name in next(reader, [])]
    if sorted(header) not in (sorted(COLUMNS), sorted(COLUMNS[:2])):
        raise ValueError(f"it begins with {','.join(header)!r:.80}, not with path,label or path,label,split")
    rows = [row for row in reader if row]
    if wrong := [number for number, row in enumerate(rows, 2) if len(row) != len(header)]:
        raise ValueError(f"row {wrong[0]} has not {len(header)} columns")
    table = [dict(zip(header, row, strict=True)) for row in rows]
    numbers = all(row["label"].isascii() and row["label"].isdecimal() and len(row["label"]) < 10 for row in table)
    for number, row in enumerate(table, 2):
        label = int(row["label"]) if numbers else row["label"]
        yield _make_image(f"row {number}", row["path"], label, row.get("split"))


def _read_json(text: str) -> Iterator[ListedImage]:
    document = json.loads(text)
    if isinstance(document, dict) and set(document) <= set(SPLITS):
        names, splits = parse_split_lists(document)
        for split, images in splits.items():
            yield from (ListedImage(path, label, split, names[label]) for path, label in images)
        return
    if not isinstance(document, list):
        raise ValueError("it is neither a list of rows nor CoOp's lists of train, val and test")
    for number, row in enumerate(document, 1):
        if isinstance(row, dict) and set(row) <= set(COLUMNS):
            row = [row[column] for column in COLUMNS if column in row] if {"path", "label"} <= set(row) else None
        if not isinstance(row, list) or len(row) not in (2, 3):
            raise ValueError(f"entry {number} is neither [path, label] nor [path, label, split]")
        yield _make_image(f"entry {number}", *row)


def _make_image(where: str, path: object, label: object, split: object = None) -> ListedImage:
    if not isinstance(path, str) or unsafe_path(path):
        reason = unsafe_path(path) if isinstance(path, str) else "is no text"
        raise ValueError(f"{where}: path {path!r:.100} {reason}")
    is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
    if not is_number and not (isinstance(label, str) and label):
        raise ValueError(f"{where}: label {label!r:.60} is neither text nor a number of 0 or more")
    if split is not None and split not in SPLITS:
        raise ValueError(f"{where}: split {split!r:.60} is none of train, val and test")
    assert isinstance(label, int | str)
    return ListedImage(path, label, "" if split is None else str(split))


def _number_classes(
    description: Description, items: Sequence[ListedImage]
) -> tuple[tuple[str, ...], dict[str | int, int]]:
    """Return the class names in label order, and the label of each class in the data."""
    found: dict[str | int, str] = {item.label: item.classname or str(item.label) for item in items}
    given = description.classes
    texts = sorted(label for label in found if isinstance(label, str))
    if texts and len(texts) < len(found):
        raise DataError(f"labels are text ({first_few(texts)}) and numbers: they must be all of one kind")
    names: dict[str | int, str]
    if given is None:
        if not texts and not all(item.classname for item in items):
            raise DataError("labels are numbers without names: list them under classes")
        names = found
    elif isinstance(given, dict):
        names = {str(key) if texts else key: name for key, name in given.items()}
    else:
        names = {name if texts else number: name for number, name in enumerate(given)}
        if len(names) < len(given):
            raise DataError(f"classes: {first_few(_repeated(given))} is listed twice")
    for label in found:
        if label not in names:
            raise DataError(f"classes: {label!r} has images and is not listed")
    if empty := [str(label) for label in names if label not in found]:
        raise DataError(f"classes: {first_few(empty)} has no images")
    # A list of names is an order of text labels; other text is sorted, and numbers are their own order.
    if texts:
        order: list[str | int] = list(names) if isinstance(given, tuple) else [*texts]
    else:
        order = list(range(len(names)))
        if absent := [label for label in order if label not in names]:
            raise DataError(f"no image has label {absent[0]}: labels are 0 to C - 1 without a gap")
    classnames = tuple(names[label] for label in order)
    if texts and (repeated := _repeated(classnames)):
        raise DataError(f"classes: two labels are called {first_few(repeated)}: nothing could tell them apart")
    for reason in unfit_texts(classnames, ()):
        raise DataError(f"{reason}: a name is one line without blanks around it")
    return classnames, {label: number for number, label in enumerate(order)}


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _assign_splits(
    description: Description, items: Sequence[ListedImage], names: Sequence[str], labels: dict[str | int, int]
) -> tuple[dict[str, Images], list[str]]:
    """Assign a split to every image, as the data give it or else by the description, and list problems of classes.

    If classes are too small for the rule, all images are in the split "".
    """
    images = {
        split: [(item.path, labels[item.label]) for item in items if item.split == split] for split in ("", *SPLITS)
    }
    unassigned, rule = images.pop(""), description.split
    if len(unassigned) < len(items):
        if unassigned:
            raise DataError(f"table: {unassigned[0][0]!r} has no split, and others have one")
        if rule is not None:
            raise DataError("split: the data define their own splits: leave it out")
    elif rule is None:
        example = "add split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}, or split: test if all images are for testing"
        raise DataError(f"the data do not define train and test: {example}")
    elif rule == "test":
        images["test"] = unassigned
    else:
        fractions = {split: fraction for split in SPLITS if (fraction := getattr(rule, split))}
        by_name = sorted(unassigned, key=lambda image: (image[1], image[0]))
        if few := _find_small_classes(by_name, names, fractions):
            return {"": by_name}, few
        images = split_classes(by_name, names, fractions, random.Random(rule.seed))
    if not images["test"]:
        raise DataError("there are no test images: nothing could be evaluated")
    if images.get("val") and not images["train"]:
        raise DataError("there are val images and no train images")
    problems = []
    for split in ("train", "test"):
        present = {names[label] for _, label in images.get(split, [])}
        for name in names if images.get(split) else ():
            if name not in present:
                close = difflib.get_close_matches(name, present, n=1, cutoff=0.7)
                hint = f"; is it {close[0]!r} there?" if close else ": add some, or remove the class from all splits"
                problems.append(f"class {name!r} has no {split} image{hint}")
    return {split: found for split, found in images.items() if found}, problems


def _find_small_classes(images: Images, names: Sequence[str], fractions: Mapping[str, float]) -> list[str]:
    counts = Counter(label for _, label in images)
    return [
        f"split: class {names[label]!r} has {count} image{'s' * (count != 1)}, too few for {', '.join(fractions)}: "
        f"add images, or change the fractions"
        for label, count in sorted(counts.items())
        if not split_sizes(count, fractions)
    ]


def describe_classes(counts: Mapping[str, int]) -> list[str]:
    """Describe unequal classes, a single class, and names that are likely two spellings of one class."""
    notes = []
    if len(counts) == 1:
        notes.append("there is one class: such a set can be evaluated, and nothing can be trained on it")
    least, most = min(counts, key=lambda name: counts[name]), max(counts, key=lambda name: counts[name])
    if counts[most] >= UNEQUAL * counts[least]:
        middle = statistics.median(counts.values())
        extremes = f"{counts[least]:,} ({least!r}) to {counts[most]:,} images ({most!r})"
        notes.append(f"classes are unequal: {extremes}, median {middle:g}")
    if single := [name for name, count in counts.items() if count == 1]:
        what = f"{len(single):,} {'class has' if len(single) == 1 else 'classes have'} 1 image: "
        notes.append(Finding.make(what, [*map(ascii, single)]))
    spellings: dict[str, list[str]] = {}
    for name in counts:
        spellings.setdefault(_normalize(name), []).append(name)
    same = [names for names in spellings.values() if len(names) > 1]
    notes += [f"classes {' and '.join(map(repr, names))} differ in case, blanks or dashes alone" for names in same]
    notes += [
        f"warning: class {name!r} ({counts[name]:,}) may be a misspelling of {other!r} ({counts[other]:,} images)"
        for name, other in _find_misspellings(counts)
    ]
    return notes


def _find_misspellings(counts: Mapping[str, int]) -> Iterable[tuple[str, str]]:
    """Find names that are one slip apart, and similar ones of rare classes; each pair begins with the smaller class."""
    ordered = sorted(counts, key=lambda name: counts[name])
    alike: dict[str, list[str]] = {}
    for name in ordered:
        for left_out in (place for place in range(len(name) + 1) if not name[place : place + 1].isdigit()):
            alike.setdefault((name[:left_out] + name[left_out + 1 :]).casefold(), []).append(name)
    found = {pair: None for names in alike.values() for pair in combinations(names, 2) if _is_slip(*pair)}
    for name in ordered[:MOST_RARE]:
        # Classes such as `scene 1` and `scene 2` are no misspellings.
        digits = re.findall(r"\d", name)
        larger = [one for one in counts if counts[one] >= RARE * counts[name] and re.findall(r"\d", one) == digits]
        found |= dict.fromkeys((name, other) for other in difflib.get_close_matches(name, larger, 1, SIMILARITY))
    return found


def _is_slip(one: str, other: str) -> bool:
    """Whether one word of five letters or more has a letter that is moved, missing, extra or, from eight on, another.

    Names that differ in the first letter, in digits or in a plural s are often names of two classes.
    """
    words = (re.split(r"[\W_]+", name.casefold()) for name in (one, other))
    differing = [sorted(pair, key=len) for pair in zip_longest(*words, fillvalue="") if pair[0] != pair[1]]
    short, long = differing[0] if len(differing) == 1 else ("", "")
    least = 8 if len(short) == len(long) and sorted(short) != sorted(long) else 5
    return len(short) >= least and (short + long).isalpha() and short[0] == long[0] and long != f"{short}s"


def compare_table(root: Path, items: Sequence[ListedImage]) -> list[str]:
    """Describe the images that a table leaves out of its folders, and labels that differ from the folders' names."""
    listed = {item.path for item in items}
    folders = dict.fromkeys(item.path.rpartition("/")[0] for item in items)
    beside = [
        path
        for folder in folders
        for name, kind in list_folder(root / folder).items()
        if kind == "file" and is_image_name(name) and (path := f"{folder}/{name}".lstrip("/")) not in listed
    ]
    what = f"left out: {len(beside):,} images that the table does not list ("
    notes: list[str] = [Finding.make(what, [*map(ascii, beside)], ")")] if beside else []
    differing = [
        item
        for item in items
        if _normalize(item.classname or str(item.label)) != _normalize(item.path.rpartition("/")[0].rpartition("/")[2])
    ]
    if differing and len(differing) <= (1 - AGREEMENT) * len(items):
        named = [ascii(f"{item.path} is {item.classname or item.label}") for item in differing]
        number = "1 label differs" if len(differing) == 1 else f"{len(differing):,} labels differ"
        notes.append(Finding.make(f"{number} from the folder of the image: ", named))
    return notes


def _normalize(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())
