"""Read published data sets from raw folders of the user, for packing or for a check: exactly CoOp's lists, or an error.

The order of the lists is kept, because few-shot samples depend on it. The files are untrusted: they are read strictly
and without building objects. Class folders have no order: CoOp takes that of the file system, here files are sorted by
name, so that few-shot draws are reproducible. Class names are spelled as in CoOp's lists (with underscores); those of
ImageNet, which its four shifts share, are OpenAI's list, as in open_clip.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.catalogue import Dataset, RawLayout
from shards.manifest import lines_digest
from shards.names import first_few, unsafe_path
from shards.raw.folders import Images, Listing, is_image_name, list_folder, split_missing, total_size
from shards.records import Source

FOLDER = Path(__file__).parent


def published_classnames(dataset: Dataset) -> tuple[str, ...]:
    """Return the raw names of a published set in label order."""
    names = _classnames().get(dataset.name) or _classnames()["imagenet"]
    return tuple(names[index] for index in raw_layout(dataset).indices) or tuple(names)


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """Return the 1000 WordNet ids of ImageNet's classes in label order, which is sorted order."""
    return tuple((FOLDER / "wnids.txt").read_text(encoding="utf-8").split())


@cache
def _classnames() -> dict[str, list[str]]:
    names: dict[str, list[str]] = json.loads((FOLDER / "classnames.json").read_text(encoding="utf-8"))
    return names


SPLITS = ("train", "val", "test")
SplitFile = TypeAdapter(dict[str, list[tuple[str, int, str]]])
UNCHANGED = "put an unchanged copy of the published file there"


@dataclass(frozen=True)
class RawLocation:
    """Where a data set lies below a raw root.

    images: what paths are relative to. lists: the folders where a list may lie, in the order they are looked at.
    """

    dataset: Dataset
    raw: RawLayout
    folder: Path
    images: Path
    lists: tuple[Path, ...]

    def find_list(self, name: str) -> Path:
        """Find a list; if it is nowhere, return the place where it belongs."""
        files = [folder / name for folder in self.lists]
        return next(filter(os.path.isfile, files), self.folder / name)


def raw_layout(dataset: Dataset) -> RawLayout:
    if dataset.raw is None:
        raise ValueError(f"{dataset.name} has no raw files")
    return dataset.raw


def find_folder(dataset: Dataset, raw_root: Path) -> Path | None:
    """Find the folder of a data set below a raw root: the first with a folder of images, else the first, else None."""
    raw = raw_layout(dataset)
    folders = [raw_root / name for name in raw.folders if os.path.isdir(raw_root / name)]
    inner = [images for images in raw.images if images != "."]
    holding = (folder for folder in folders if any(os.path.isdir(folder / images) for images in inner))
    return next(holding, folders[0] if folders else None)


def find_location(dataset: Dataset, raw_root: Path) -> RawLocation:
    """Find the images of a data set. Raises UserError with the place where they belong."""
    raw, folder = raw_layout(dataset), find_folder(dataset, raw_root)
    # Report a folder without read permission, which otherwise looks empty.
    list_folder(folder or raw_root)
    expected = (folder or raw_root / raw.folders[0]) / raw.images[0]
    if folder is None:
        what = f"there is no folder {raw.folders[0]} in {raw_root}"
        raise UserError(f"{what}; get {raw.get}; the images belong in {expected}")
    images = next((folder / images for images in raw.images if os.path.isdir(folder / images)), None)
    if images is None:
        raise UserError(f"there is no folder {expected}; get {raw.get}; the images belong there")
    folders = (raw_root / name for name in raw.folders if os.path.isdir(raw_root / name))
    return RawLocation(dataset, raw, folder, images, tuple(dict.fromkeys((folder, *folders, folder.parent, raw_root))))


def class_folder_names(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the class folders in label order; they can differ from the class names."""
    raw = raw_layout(dataset)
    if raw.layout == "numbered-folders":
        return tuple(map(str, range(dataset.classes)))
    if raw.layout in ("imagenet", "wnid-folders"):
        wnids = imagenet_wnids()
        return tuple(wnids[index] for index in raw.indices) or wnids
    return published_classnames(dataset)


def read_published(location: RawLocation) -> Listing:
    """Read the lists or class folders of a data set. Raises UserError if a list is missing or broken."""
    layout = location.raw.layout
    if layout == "split-file":
        return _read_split_file(location)
    if layout == "variant-lists":
        return _read_variant_lists(location)
    prefixes = {"train": "train/", "test": "val/"} if layout == "imagenet" else {"test": ""}
    scans = {split: _scan_class_folders(location, prefix) for split, prefix in prefixes.items()}
    origin = {"imagenet": "ImageNet", "wnid-folders": "class", "numbered-folders": "numbered"}[layout]
    return Listing(
        location.images,
        published_classnames(location.dataset),
        {split: images for split, (images, _) in scans.items()},
        f"{origin} folders, files sorted by name",
        True,
        tuple(problem for _, problems in scans.values() for problem in problems),
    )


def _scan_class_folders(location: RawLocation, prefix: str = "") -> tuple[Images, list[str]]:
    """List the images of the class folders below `location.images / prefix`, and what is wrong there."""
    root = location.images / prefix
    labels = {name: label for label, name in enumerate(class_folder_names(location.dataset))}
    entries = list_folder(root) if root.is_dir() else {}
    folders = [name for name, entry in entries.items() if entry == "folder"]
    images: Images = []
    strays: list[str] = []
    for name in sorted((name for name in folders if name in labels), key=labels.__getitem__):
        for file, entry in list_folder(root / name).items():
            path = f"{prefix}{name}/{file}"
            if entry == "file" and is_image_name(file) and not unsafe_path(file):
                images.append((path, labels[name]))
            else:
                strays.append(path)
    # The folder of the data set itself may hold others than those of the classes.
    if location.images != location.folder:
        strays = [f"{prefix}{name}" for name in folders if name not in (*labels, *location.raw.ignored)] + strays
    problems = []
    if strays:
        what = f"{location.images} holds {first_few(strays)}, neither class folders nor images"
        problems.append(f"{what}; move them out of there")
    if prefix and entries and not folders:
        problems.append(f"{root} holds {len(entries):,} files and no class folder; sort them into class folders")
    return images, problems


def _read_split_file(location: RawLocation) -> Listing:
    """Read CoOp's lists of `[path, label, class name]` per split; `published_differences` compares them."""
    file = location.find_list(location.raw.split_file)
    try:
        document = SplitFile.validate_json(file.read_bytes(), strict=True)
        splits = {split: [(path, label) for path, label, _ in document[split]] for split in SPLITS}
        names = {label: name for rows in document.values() for _, label, name in rows}
        classnames = tuple(names[label] for label in range(len(names)))
        _check_paths(splits)
    except FileNotFoundError:
        raise UserError(f"the official split file {file} is missing; get {location.raw.get}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error}); {UNCHANGED}") from error
    except LookupError as error:
        raise UserError(f"{file} lacks split or label {error}; {UNCHANGED}") from error
    except ValueError as error:
        reason = describe_invalid(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{file}: {reason[:300]}; {UNCHANGED}") from error
    return Listing(location.images, classnames, splits, f"CoOp split {location.raw.split_file}")


def _read_variant_lists(location: RawLocation) -> Listing:
    """Read `variants.txt`, whose line number is the label, and `images_variant_<split>.txt`."""
    classnames = tuple(_read_lines(location, "variants.txt"))
    labels = {name: label for label, name in enumerate(classnames)}
    try:
        splits: dict[str, Images] = {}
        for split in SPLITS:
            lines = (line.partition(" ") for line in _read_lines(location, f"images_variant_{split}.txt"))
            splits[split] = [(f"{image}.jpg", labels[name]) for image, _, name in lines]
        _check_paths(splits)
    except (KeyError, ValueError) as error:
        raise UserError(f"the lists beside {location.images} are damaged ({error}); {UNCHANGED}") from error
    return Listing(location.images, classnames, splits, "official variant lists")


def _check_paths(splits: Mapping[str, Images]) -> None:
    """Raise ValueError for a path that leaves the folder of the images."""
    for split, images in splits.items():
        for path, _ in images:
            if reason := unsafe_path(path):
                raise ValueError(f"{split}: {path[:80]!a} {reason}")


def _read_lines(location: RawLocation, name: str) -> list[str]:
    """Read the lines of a list that are not empty, without outer blanks."""
    file = location.find_list(name)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{file} is missing; put it there: get {location.raw.get}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); {UNCHANGED}") from error
    return [line.strip() for line in lines if line.strip()]


def raw_source(dataset: Dataset, raw_root: Path, *, whole: bool = True) -> Source:
    """Make a source of a published data set as CoOp lists it: paths, labels, names, order.

    whole: raise UserError for the first difference from the published set; otherwise they are its `problems`.
    """
    try:
        location = find_location(dataset, raw_root)
        listing = read_published(location)
        existing, missing = _existing_images(dataset, listing)
        problems = (*listing.problems, *published_differences(dataset, listing), *missing)
        if whole and problems:
            raise UserError(problems[0])
    except UserError as error:
        raise UserError(f"'{dataset.name}': {error}") from error
    return Source(
        name=dataset.name,
        classnames=listing.classnames,
        template=dataset.template,
        templates=dataset.templates,
        origin=f"{listing.origin}, lists {existing.digest()}",
        counts=existing.counts,
        part=existing.part,
        size=total_size(listing.root, existing.paths),
        problems=problems,
    )


def published_differences(dataset: Dataset, listing: Listing) -> Iterator[str]:
    """List the differences of the lists from the published ones; does not look for the images on disk."""
    raw, counts = raw_layout(dataset), listing.counts
    wrong = {split: count for split, count in dataset.counts.items() if counts.get(split, 0) != count}
    if listing.scanned:
        for split, count in wrong.items():
            what = f"{split}: {counts[split]:,} images in {listing.root}, published {count:,}"
            absent = sorted(set(range(dataset.classes)) - {label for _, label in listing.splits[split]})
            if 0 < len(absent) < dataset.classes:
                names = first_few([listing.classnames[label] for label in absent])
                what += f"; {len(absent)} classes have none: {names}"
            yield f"{what}; {'take out what was added' if counts[split] > count else _get_the_rest(dataset)}"
        return
    if wrong:
        split, count = next(iter(wrong.items()))
        difference = f"{counts.get(split, 0):,} {split} images are listed, published {count:,}"
    elif lines_digest(listing.classnames) != raw.classnames_digest:
        difference = "the class names differ"
    elif not _has_published_lines(dataset, listing):
        difference = "the lists differ"
    else:
        return
    if raw.split_file:
        hint = "CoOp writes a private one under that name when it is missing"
        yield f"{raw.split_file} is not the published split: {difference} ({hint}); get {raw.get}"
    else:
        yield f"{listing.origin} in {listing.root.parent} are not the published ones: {difference}; get {raw.get}"


def _has_published_lines(dataset: Dataset, listing: Listing) -> bool:
    raw = raw_layout(dataset)
    if raw.split_digests or not raw.split_file:
        return all(lines_digest(listing.lines(split)) == digest for split, digest in raw.split_digests.items())
    # No digest is known of Food101's and SUN397's split files, in which all classes are equally large.
    sizes = {split: set(Counter(label for _, label in images).values()) for split, images in listing.splits.items()}
    return all(sizes[split] == {count // dataset.classes} for split, count in dataset.counts.items())


def _existing_images(dataset: Dataset, listing: Listing) -> tuple[Listing, list[str]]:
    """Return a listing of the images that are files, and a problem for each split in which some are missing."""
    splits, problems = {}, []
    for split, images in listing.splits.items():
        splits[split], missing = (images, []) if listing.scanned else split_missing(listing.root, images)
        if missing:
            what = f"{split}: {len(missing):,} of {len(images):,} images are missing: {first_few(missing)}"
            problems.append(f"{what}; {_get_the_rest(dataset)}")
    return replace(listing, splits={split: images for split, images in splits.items() if images}), problems


def _get_the_rest(dataset: Dataset) -> str:
    return f"get the rest ({raw_layout(dataset).get})"
