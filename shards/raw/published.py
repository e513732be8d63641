"""Read published data sets from raw folders of the user, for packing or for a check: exactly CoOp's lists, or an error.

The order of the lists is kept, because few-shot samples depend on it; files of class folders are sorted by name, where
CoOp takes the order of the file system. The files are untrusted: they are read strictly. Class names are spelled as in
CoOp's lists; those of ImageNet, which its four shifts share, are OpenAI's, as in open_clip.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from procap.errors import UserError, describe_invalid
from shards.catalogue import UNKNOWN, Dataset, RawLayout
from shards.files import read_regular
from shards.manifest import lines_digest
from shards.names import first_few, unsafe_path
from shards.raw.folders import LabelledPaths, Listing, list_folder, list_images, missing_files
from shards.source import Source

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
    expected = (folder or raw_root / raw.folders[0]) / raw.images[0]
    images = next((folder / images for images in raw.images if folder and os.path.isdir(folder / images)), None)
    if folder is None or images is None:
        raise UserError(f"there is no folder {expected}; get {raw.get}; the images belong there")
    folders = (raw_root / name for name in raw.folders if os.path.isdir(raw_root / name))
    return RawLocation(dataset, raw, folder, images, tuple(dict.fromkeys((folder, *folders, folder.parent, raw_root))))


def class_folder_names(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the class folders in label order; they can differ from the class names."""
    raw = raw_layout(dataset)
    # ImageNetV2's folders are called by labels, those of the other shifts by WordNet ids.
    if raw.layout == "numbered-folders":
        return tuple(map(str, range(dataset.num_classes)))
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
    if layout == "unlabelled":
        images = {"test": [(path, 0) for path in list_images(location.images)[0]]}
        return Listing(location.images, (UNKNOWN,), images, "images sorted by name", scanned=True)
    # Labels of ImageNet's test images are not public, so everybody tests on its validation images.
    prefixes = {"train": "train/", "test": "val/"} if layout == "imagenet" else {"test": ""}
    origin = {"imagenet": "ImageNet", "wnid-folders": "class", "numbered-folders": "numbered"}[layout]
    return Listing(
        location.images,
        published_classnames(location.dataset),
        {split: _scan_class_folders(location, prefix) for split, prefix in prefixes.items()},
        f"{origin} folders, files sorted by name",
        scanned=True,
    )


def _scan_class_folders(location: RawLocation, prefix: str) -> LabelledPaths:
    """List the images of class folders; what is missing or too much shows in the counts, which are published."""
    root = location.images / prefix
    return [
        (f"{prefix}{name}/{file}", label)
        for label, name in enumerate(class_folder_names(location.dataset))
        if (root / name).is_dir()
        for file, entry in list_folder(root / name).items()
        if entry == "image" and not unsafe_path(file)
    ]


def _read_split_file(location: RawLocation) -> Listing:
    """Read CoOp's lists of `[path, label, class name]` per split; `check_published` compares them."""
    file = location.find_list(location.raw.split_file)
    try:
        document = SplitFile.validate_json(read_regular(file), strict=True)
        splits = {split: [(path, label) for path, label, _ in document[split]] for split in SPLITS}
        names = {label: name for rows in document.values() for _, label, name in rows}
        # A gap in the labels is a KeyError: such a file is damaged.
        classnames = tuple(names[label] for label in range(len(names)))
    except FileNotFoundError:
        raise UserError(f"the official split file {file} is missing; get {location.raw.get}") from None
    except (OSError, LookupError, ValueError) as error:
        reason = describe_invalid(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{file} is damaged ({reason[:300]}); {UNCHANGED}") from error
    return Listing(location.images, classnames, splits, f"CoOp split {location.raw.split_file}")


def _read_variant_lists(location: RawLocation) -> Listing:
    """Read `variants.txt`, whose line number is the label, and `images_variant_<split>.txt`."""
    splits: dict[str, LabelledPaths] = {}
    try:
        classnames = tuple(_read_lines(location, "variants.txt"))
        labels = {name: label for label, name in enumerate(classnames)}
        for split in SPLITS:
            # A line is the number of the image and the variant, whose name can contain blanks.
            lines = (line.partition(" ") for line in _read_lines(location, f"images_variant_{split}.txt"))
            splits[split] = [(f"{image}.jpg", labels[name]) for image, _, name in lines]
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing; put it there: get {location.raw.get}") from None
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"the lists next to {location.images} are damaged ({error}); {UNCHANGED}") from error
    return Listing(location.images, classnames, splits, "official variant lists")


def _read_lines(location: RawLocation, name: str) -> list[str]:
    """Read the lines of a list that are not empty, without outer blanks."""
    lines = read_regular(location.find_list(name)).decode("utf-8-sig").split("\n")
    return [line.strip() for line in lines if line.strip()]


def published_source(dataset: Dataset, raw_root: Path) -> Source:
    """Make a source of a published set as CoOp lists it. Raises UserError for differences and missing images."""
    try:
        listing = read_published(find_location(dataset, raw_root))
        check_published(dataset, listing)
    except UserError as error:
        raise UserError(f"'{dataset.name}': {error}") from error
    return listing.make_source(dataset.name, dataset.template, dataset.templates)


def check_published(dataset: Dataset, listing: Listing) -> None:
    """Raise UserError unless lists are the published ones and all their images are files."""
    raw, counts = raw_layout(dataset), listing.counts
    wrong = {split: count for split, count in dataset.counts.items() if counts.get(split, 0) != count}
    get_the_rest = f"get the rest ({raw.get})"
    if listing.scanned:
        for split, count in wrong.items():
            what = f"{split}: {counts[split]:,} images in the folders of {listing.root}, published {count:,}"
            raise UserError(f"{what}; {'take out what was added' if counts[split] > count else get_the_rest}")
        return
    same_names = lines_digest(listing.classnames) == raw.classnames_digest
    if wrong or not same_names or not _has_published_lines(dataset, listing):
        hint = "CoOp writes a private one under that name when it is missing"
        raise UserError(f"{raw.split_file or 'variants.txt'} is not the published split ({hint}); get {raw.get}")
    for split, images in listing.splits.items():
        if missing := missing_files(listing.root, (path for path, _ in images)):
            what = f"{split}: {len(missing):,} of {len(images):,} images are missing: {first_few(missing)}"
            raise UserError(f"{what}; {get_the_rest}")


def _has_published_lines(dataset: Dataset, listing: Listing) -> bool:
    raw = raw_layout(dataset)
    # Nothing is known of the lines of variant lists: names and counts alone are compared.
    if raw.split_digests or not raw.split_file:
        return all(lines_digest(listing.lines(split)) == digest for split, digest in raw.split_digests.items())
    # No digest is known of Food101's and SUN397's split files, in which all classes are equally large. So they are in a
    # private one, which has other images.
    sizes = {split: set(Counter(label for _, label in images).values()) for split, images in listing.splits.items()}
    same_sizes = all(sizes[split] == {count // dataset.num_classes} for split, count in dataset.counts.items())
    return same_sizes and all(listing.splits["train"][number][0] == path for number, path in raw.train_lines)
