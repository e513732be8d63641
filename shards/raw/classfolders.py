"""Read data sets whose labels are their class folders: ImageNet and its four shifts.

A label is a position in the published class list, not among the folders on disk. CoOp takes the files of a class folder
in the order of the file system; here they are sorted by name, so that few-shot draws are reproducible.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from shards.dataset import Dataset
from shards.raw.classnames import published_classnames
from shards.raw.folders import Listing, RawProblem, Rows, entries, image_names, is_folder
from shards.raw.locations import RawLocation, raw_layout, wnids

NAMED = 3


def scan_imagenet(location: RawLocation) -> Listing:
    """List the images in class folders of `train` and `val`; val is the test split. Paths start with the folder."""
    images = location.require_images()
    labels = {wnid: label for label, wnid in enumerate(wnids(location.dataset))}
    problems: list[RawProblem] = []
    splits = {}
    for split, folder in (("train", "train"), ("test", "val")):
        # Plain files are ignored, as in CoOp; but `_flat` reports a folder with nothing but files, a common mistake.
        found = entries(images / folder) if os.path.isdir(images / folder) else []
        folders = [entry.name for entry in found if is_folder(entry)]
        files = [entry.name for entry in found if not is_folder(entry)]
        problems += [_flat(location, images / folder, files)] if files and not folders else []
        splits[split], strays = _scan(images, {name: labels[name] for name in folders if name in labels}, f"{folder}/")
        strays = [f"{folder}/{name}" for name in folders if name not in labels] + strays
        problems += strays_among(location.raw_root, images, strays)
    return Listing(
        images,
        published_classnames(location.dataset),
        splits,
        "ImageNet folders, files sorted by name",
        True,
        tuple(problems),
    )


def scan_wnid_folders(location: RawLocation) -> Listing:
    """List test images in folders named by WordNet id."""
    labels = {wnid: label for label, wnid in enumerate(wnids(location.dataset))}
    return _scan_test(location, labels, "class folders, files sorted by name")


def scan_numbered_folders(location: RawLocation) -> Listing:
    """List test images in folders named by label, in numerical order."""
    return _scan_test(
        location,
        {str(label): label for label in range(location.dataset.classes)},
        "numbered folders, files sorted by name",
    )


def _scan_test(location: RawLocation, labels: Mapping[str, int], origin: str) -> Listing:
    dataset, images = location.dataset, location.require_images()
    # CoOp needs classnames.txt in the data set's folder, which for some sets also holds the class folders.
    ignored = {*raw_layout(dataset).ignored, *(("classnames.txt",) if images == location.folder else ())}
    found = [entry for entry in entries(images) if entry.name not in ignored]
    classes = {entry.name: labels[entry.name] for entry in found if entry.name in labels and is_folder(entry)}
    rows, strays = _scan(images, classes)
    strays = [entry.name for entry in found if entry.name not in classes] + strays
    problems = tuple(strays_among(location.raw_root, images, strays))
    return Listing(images, published_classnames(dataset), {"test": rows}, origin, True, problems)


def _scan(images: Path, classes: Mapping[str, int], prefix: str = "") -> tuple[Rows, list[str]]:
    """List the images of class folders in label order, and the other entries of those folders."""
    paths: list[str] = []
    labels: list[int] = []
    strays: list[str] = []
    for folder, label in sorted(classes.items(), key=lambda item: item[1]):
        names, others = image_names(images / prefix / folder)
        paths += [f"{prefix}{folder}/{name}" for name in names]
        labels += [label] * len(names)
        strays += [f"{prefix}{folder}/{name}" for name in others]
    return Rows(paths, labels), strays


def strays_among(raw_root: Path, images: Path, strays: Sequence[str]) -> list[RawProblem]:
    if not strays:
        return []
    named = [_quoted(images / stray) for stray in strays[:NAMED]]
    more = f" and {len(strays) - NAMED:,} more" if len(strays) > NAMED else ""
    what = f"{', '.join(named)}{more} lie among the classes and are neither class folders nor images"
    if len(strays) == 1:
        what = f"{named[0]} lies among the classes and is neither a class folder nor an image"
    return [RawProblem(what, f"move it out of there: mv -i {' '.join(named)} {shlex.quote(str(raw_root))}/")]


def _quoted(path: Path) -> str:
    """Quote a path for a shell, on one line whatever the path."""
    if str(path).isprintable():
        return shlex.quote(str(path))
    # Escape byte by byte, because a name that is not UTF-8 cannot be written as text.
    letters = {10: r"\n", 9: r"\t"} | {byte: chr(byte) for byte in range(32, 127) if byte not in b"'\\"}
    plain = (letters.get(byte, f"\\x{byte:02x}") for byte in os.fsencode(path))
    return f"$'{''.join(plain)}'"


def _flat(location: RawLocation, folder: Path, files: Sequence[str]) -> RawProblem:
    there = shlex.quote(str(folder))
    tars = [file for file in files if file.endswith(".tar")]
    if tars:
        unpack = 'for f in *.tar; do mkdir -p "${f%.tar}" && tar -xf "$f" -C "${f%.tar}" && rm "$f"; done'
        return RawProblem(
            f"{folder} holds {len(tars):,} class archives that are not unpacked", f"cd {there} && {unpack}"
        )
    what = f"{folder} holds {len(files):,} files and no class folder: its images must be moved into class folders"
    if folder.name == "train":
        return RawProblem(what, "unpack ILSVRC2012_img_train.tar there again: it holds an archive for each class")
    solution = next((found for found in _solutions(location) if os.path.isfile(found)), None)
    if solution:
        # Absolute, because the suggested command changes the working directory first.
        pairs = f"tail -n +2 {shlex.quote(os.path.abspath(solution))} | tr ',' ' '"
        move = 'mkdir -p "$class" && mv "$image.JPEG" "$class/"'
        return RawProblem(what, f"cd {there} && {pairs} | while read -r image class rest; do {move}; done")
    archives = "ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz"
    root = shlex.quote(str(folder.parent))
    # torchvision unpacks and sorts only if there is no folder of that name.
    aside = f"mv -i {there} {shlex.quote(f'{folder}-unsorted')}"
    sort = f"""python -c "import sys; from torchvision.datasets import ImageNet; ImageNet(sys.argv[1], 'val')" {root}"""
    remedy = f"with the script valprep.sh of soumith/imagenetloader.torch run inside it, or anew from {archives}"
    return RawProblem(what, f"{remedy} in {root}: {aside} && {sort}")


def _solutions(location: RawLocation) -> list[Path]:
    """List the possible places of Kaggle's list of validation classes: beside the images or above them."""
    above = [location.require_images(), location.folder, *location.lists]
    return [folder / "LOC_val_solution.csv" for folder in (*above, *location.require_images().parents[:3])]


def absent_classes(dataset: Dataset, rows: Rows) -> list[int]:
    """List the labels without an image."""
    return sorted(set(range(dataset.classes)) - set(rows.labels))
