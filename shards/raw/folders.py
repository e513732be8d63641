"""Raw image folders: list images, find missing ones, split them at random, and read them for packing.

Nothing in `shards.raw` writes below a raw folder. Names in lists and on the disk are untrusted: see `shards.names`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from procap.errors import UserError
from shards.files import read_regular
from shards.names import first_few, has_control, unsafe_path
from shards.source import JPEG_ENDINGS, MEMBER_EXTENSIONS, ImageRecord, RecordReader, Source

LabelledPaths = list[tuple[str, int]]
"""Images of one split in list order: a path relative to the folder of the images, and a label."""

IMAGE_EXTENSIONS = frozenset((*MEMBER_EXTENSIONS, *JPEG_ENDINGS))
NOTES = frozenset(("db", "ini", "txt", "md", "csv", "tsv", "json", "xml", "yaml", "yml", "html", "log", "pdf"))
"""Extensions of files that people and systems leave among images."""
LEAVINGS = frozenset((
    "__macosx", "@eadir", "@tmp", "@recycle", "#recycle", "#snapshot", "lost+found", "found.000", "$recycle.bin",
    "system volume information", "network trash folder", "temporary items", "lost.dir", "__pycache__", "_thumb",
    "_thumbs", "_thumbnails", "thumbs", "thumbnails",
))  # fmt: skip
"""Folders, in lower case, of copies and deleted files, which archives, file servers, cameras and systems create."""


@dataclass(frozen=True)
class Listing:
    """The labelled images below `root`, by split: from lists, from class folders, or drawn at random.

    origin: what the lists are. scanned: they come from reading folders. max_side: as in `read_images`.
    """

    root: Path
    classnames: tuple[str, ...]
    splits: Mapping[str, LabelledPaths]
    origin: str
    scanned: bool = False
    max_side: int | None = None

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(images) for split, images in self.splits.items()}

    @cached_property
    def sizes(self) -> list[int]:
        """List the bytes of each file; 0 for a file that cannot be read, which `read_images` reports."""
        files = [self.root / path for images in self.splits.values() for path, _ in images]
        return [os.path.getsize(file) if os.path.isfile(file) else 0 for file in files]

    def lines(self, split: str) -> Iterator[str]:
        """Yield the lines that digests of published splits are computed from."""
        return (f"{path}\t{label}\t{self.classnames[label]}" for path, label in self.splits[split])

    def digest(self) -> str:
        """Compute 16 hex digits that change with any path, label or name of any split."""
        total = hashlib.sha256()
        for split in self.splits:
            for line in (split, *self.lines(split)):
                total.update(f"{line}\n".encode())
        return total.hexdigest()[:16]

    def make_reader(self, split: str, start: int, stop: int) -> RecordReader:
        return partial(read_images, self.root, self.splits[split][start:stop], self.max_side)

    def make_source(self, name: str, template: str, templates: tuple[str, ...], details: str = "") -> Source:
        """Make a source of these images. details: what else changes the packed images, added to the origin."""
        return Source(
            name,
            self.classnames,
            template,
            templates,
            f"{self.origin}, lists {self.digest()}{details}",
            self.counts,
            self.make_reader,
            sum(self.sizes),
        )


def read_images(root: Path, images: LabelledPaths, max_side: int | None = None) -> Iterator[ImageRecord]:
    """Yield files below `root`, whole or with `max_side` pixels on the short side; a broken one has the reason."""
    # Imported here, because lists of images are read without Pillow.
    from shards.images import shrink

    for path, label in images:
        try:
            data = read_regular(root / path)
        except OSError as error:
            yield ImageRecord(path, label, b"", error.strerror or str(error))
        else:
            yield ImageRecord(path, label, shrink(data, max_side) if max_side else data)


def list_folder(folder: Path) -> dict[str, str]:
    """Map the sorted names in a folder to "folder", "image", "file", "leavings" or "other"; hidden ones are left out.

    Links are followed. "image": a file with the extension of an image that is read. "leavings": see `LEAVINGS`.
    "other": a link without a target, a pipe or a device.
    """

    def classify(entry: os.DirEntry[str]) -> str:
        # The methods of an entry need no call of the system, and raise for a link to itself.
        is_link = entry.is_symlink()
        if os.path.isdir(entry) if is_link else entry.is_dir():
            return "leavings" if entry.name.lower() in LEAVINGS else "folder"
        is_file = os.path.isfile(entry) if is_link else entry.is_file()
        return ("image" if is_image_name(entry.name) else "file") if is_file else "other"

    try:
        with os.scandir(folder) as entries:
            shown = {entry.name: classify(entry) for entry in entries if not entry.name.startswith(".")}
            # The order of `scandir` differs between file systems, and few-shot draws depend on the order of a list.
            return dict(sorted(shown.items()))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror})") from error


def walk_files(root: Path, folder: str = "") -> Iterator[tuple[str, str]]:
    """Yield what lies below `root / folder` and is no folder: its path relative to root, and what `list_folder` says.

    Linked folders are read after all others, each folder once, however many links lead to it, and none around this one.
    """
    start, whole = Path(os.path.realpath(root / folder)), Path(os.path.realpath(root))
    # What lies around it are the folders of different classes.
    waiting, visited = [folder], {*map(str, (whole, *whole.parents, *start.parents))} - {str(start)}
    while waiting:
        path = waiting.pop()
        if (target := os.path.realpath(root / path)) in visited:
            continue
        visited.add(target)
        for name, entry in list_folder(root / path).items():
            inner = posixpath.join(path, name)
            if entry == "folder":
                waiting.insert(0 if os.path.islink(root / inner) else len(waiting), inner)
            else:
                yield inner, entry


def list_images(root: Path) -> tuple[list[str], list[str]]:
    """List all images below `root` whose names can be stored, by code point, and notes of files that are no images."""
    entries = sorted((path, entry) for path, entry in walk_files(root) if entry != "leavings")
    paths = [path for path, entry in entries if entry == "image" and not unsafe_path(path)]
    unread = sorted({path for path, _ in entries} - {*paths})
    return paths, [describe_left_out(unread, len(paths))] if unread else []


def describe_left_out(files: Sequence[str], packed: int) -> str:
    """Describe files that are not packed: their number, the first, their endings, and what would make images of them.

    It is a warning if they are a tenth of the `packed` images or more, notes apart, or their names cannot be stored.
    """
    endings = Counter(posixpath.splitext(file)[1].lower()[1:] for file in files)
    counts = ", ".join(f"{count:,} {ending or 'without ending'}" for ending, count in endings.most_common(4))
    unnamed = [file for file in files if has_control(file) and is_image_name(file)]
    hints = [f"{len(files):,} file{'s' * (len(files) != 1)}: {first_few(files)} ({counts})"]
    hints += ["HEIC is not read: convert it to JPEG, for example with heif-convert"] * ("heic" in endings)
    hints += [f"names must be UTF-8 without control characters: rename {first_few(unnamed)}"] * bool(unnamed)
    many = 10 * sum(count for ending, count in endings.items() if ending not in NOTES) >= packed
    return f"{'warning: ' * (many or bool(unnamed))}left out: {'; '.join(hints)}"


def describe_unread(files: Sequence[str]) -> str:
    """Describe files of which none is an image, in parentheses; "" without files."""
    return f" ({describe_left_out(files, 0)})".replace("warning: ", "") if files else ""


def is_image_name(file: str) -> bool:
    """Whether a file name has the extension of an image format that is read."""
    stem, _, extension = file.rpartition(".")
    return bool(stem) and extension.lower() in IMAGE_EXTENSIONS


def missing_files(root: Path, paths: Iterable[str]) -> list[str]:
    """List the paths that are no files below `root`."""
    return [path for path in paths if not os.path.isfile(root / path)]


def split_classes(images: LabelledPaths, fractions: Mapping[str, float], seed: int) -> dict[str, LabelledPaths]:
    """Shuffle each class, in order of first appearance, and cut it into `fractions`; the last takes the rest.

    CoOp's rule, with a separate random stream instead of the global one.
    """
    draw = random.Random(seed)
    by_class: dict[int, list[str]] = {}
    for path, label in images:
        by_class.setdefault(label, []).append(path)
    splits: dict[str, LabelledPaths] = {split: [] for split in fractions}
    for label, paths in by_class.items():
        draw.shuffle(paths)
        rest = iter(paths)
        for split, size in split_sizes(len(paths), fractions).items():
            splits[split] += [(path, label) for path in islice(rest, size)]
    return splits


def split_sizes(count: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Divide `count` images by `fractions`, of which the last takes the rest."""
    sizes = {split: round(fraction * count) for split, fraction in fractions.items()}
    last = [*fractions][-1]
    return sizes | {last: count - sum(size for split, size in sizes.items() if split != last)}
