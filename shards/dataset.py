"""The record of a data set in the catalogue: classes, sizes, prompts, and the layout of its raw files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Layout = Literal["split-file", "imagenet", "wnid-folders", "numbered-folders", "variant-lists"]


@dataclass(frozen=True)
class RawLayout:
    """How the raw files of a published data set lie on a disk.

    folders: possible names of the data set's folder below the raw root: CoOp's first, then those of unpacked archives.
    images: possible folders of the images below that, CoOp's first; "." is the folder itself.
    get: where to get images and lists, one sentence.
    split_file: the official list of train, val and test. split_digests: digests of its splits, if known.
    random_split: what CoOp splits without that file: class folders, the official train list, or a file of labels.
    ignored: entries among the class folders that are no class. renamed: class folder to class name.
    indices: ImageNet's numbers of the classes, for a set with a part of them; () means all of them in order.
    public: the clip-benchmark set of the same images on the Hub. public_problem: why its test split cannot be used.
    """

    layout: Layout
    folders: tuple[str, ...]
    images: tuple[str, ...]
    get: str
    split_file: str = ""
    classnames_digest: str = ""
    split_digests: Mapping[str, str] = field(default_factory=dict)
    random_split: Literal["", "folders", "trainval", "labels"] = ""
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    indices: tuple[int, ...] = field(default=(), repr=False)
    public: str = ""
    public_problem: str = ""


@dataclass(frozen=True)
class Dataset:
    """One row of the catalogue.

    template: the hand-written prompt of the CoOp family, one `{}` and a full stop.
    templates: the prompts that initialise learned tokens, one `{}` each, without full stop.
    counts: images per split; a `test_only` set has no other split than "test".
    source: "world" is drawn from numbers, "scans" ships with scikit-learn, "folder" is read from raw files of the user,
        "packed" is known from its packed shards alone.
    title: its name as papers print it.
    base: the set that a derived one comes from, else its own name. variant: how it differs from that, "" when it is it.
    random_split: the seed of a random split. subset: only the files that are there. resize: pixels of the shorter side.
    """

    name: str
    classes: int
    counts: Mapping[str, int]
    template: str
    templates: tuple[str, ...]
    source: Literal["world", "scans", "folder", "packed"]
    licence: str
    description: str
    classnames: tuple[str, ...] = field(default=(), repr=False)
    aliases: tuple[str, ...] = ()
    title: str = ""
    base: str = ""
    variant: str = ""
    random_split: int | None = None
    subset: bool = False
    resize: int | None = None
    raw: RawLayout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)
        object.__setattr__(self, "base", self.base or self.name)

    @property
    def test_only(self) -> bool:
        return set(self.counts) == {"test"}
