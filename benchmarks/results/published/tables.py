"""Load the tables of the ProCAP paper from the CSV files in this folder, with our names for data sets and methods.

Every number is a percentage with two decimals as printed, unless its field differs. The paper compares eighteen
methods; five of them are implemented here, the others have no `key`.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

PUBLISHED = Path(__file__).parent
AVERAGE = "Average"
"""Used as the data set's name in rows of averages; real data set names are lower case."""

DATASETS: Mapping[str, str] = MappingProxyType(
    {
        "imagenet": "ImageNet",
        "caltech101": "Caltech101",
        "oxford-pets": "OxfordPets",
        "stanford-cars": "StanfordCars",
        "oxford-flowers": "Flowers102",
        "food101": "Food101",
        "fgvc-aircraft": "FGVCAircraft",
        "sun397": "SUN397",
        "dtd": "DTD",
        "eurosat": "EuroSAT",
        "ucf101": "UCF101",
        "imagenetv2": "ImageNetV2",
        "imagenet-sketch": "ImageNet-Sketch",
        "imagenet-a": "ImageNet-A",
        "imagenet-r": "ImageNet-R",
    }
)
"""The paper's name of a data set, by our name."""

METHOD_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "CLIP": "zeroshot",
        "CoOp": "coop",
        "CoCoOp": "cocoop",
        "MaPLe": "maple",
        "MaPLe-style": "maple",
        "ProCAP": "procap",
        "ProCAP (Full)": "procap",
    }
)
"""Our name of a method, by the paper's. "MaPLe-style" is MaPLe in ProCAP's recipe, with as many tokens."""

COMPONENTS = ("cross_attention", "gaussian", "kl", "l2", "infonce")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class PublishedHalves:
    """A row of the main table. dataset: our name, or AVERAGE; venue: "Ours" for ProCAP; hm: harmonic mean."""

    method: str
    key: str | None
    venue: str
    dataset: str
    base: float
    novel: float
    hm: float


@dataclass(frozen=True)
class PublishedTransfer:
    """A row of transfer results after training on ImageNet: accuracy on ImageNet, on each target, and their mean."""

    method: str
    key: str | None
    venue: str
    source: float
    targets: Mapping[str, float]
    target_mean: float


@dataclass(frozen=True)
class PublishedSpread:
    """Mean and standard deviation of ProCAP over seeds 1, 2, 3. dataset: our name, or AVERAGE."""

    dataset: str
    base: float
    base_std: float
    novel: float
    novel_std: float
    hm: float
    hm_std: float


@dataclass(frozen=True)
class PublishedAblation:
    """A variant by its printed name, its COMPONENTS, and its harmonic means by our data set names."""

    variant: str
    key: str
    components: Mapping[str, bool]
    hm: Mapping[str, float]
    average: float


@dataclass(frozen=True)
class PublishedDuration:
    """ProCAP after `epochs` epochs, averaged over the eleven data sets."""

    method: str
    key: str
    epochs: int
    base: float
    novel: float
    hm: float


@dataclass(frozen=True)
class PublishedRuntime:
    """A row of the runtime table: training seconds of 10 epochs, images per second in inference, accuracy."""

    method: str
    key: str
    dataset: str
    train_seconds: float
    images_per_second: float
    accuracy: float


@dataclass(frozen=True)
class PublishedSize:
    """A data set's number of classes, and of images by split. within: the largest rounding error of the counts."""

    dataset: str
    classes: int
    counts: Mapping[str, int]
    within: Mapping[str, int]
    description: str


def display_name(dataset: str) -> str:
    """Return the paper's name of a data set, "Average" for AVERAGE; other data sets keep their name."""
    return DATASETS.get(dataset, dataset)


def dataset_name(printed: str) -> str:
    """Return our name of a data set that the paper prints. Raises KeyError for any other."""
    return AVERAGE if printed.capitalize() == AVERAGE else _names()[printed]


def method_key(printed: str) -> str | None:
    """Return our name of a method that the paper prints, None if it is not implemented here."""
    return METHOD_KEYS.get(printed)


def base_to_novel(folder: Path = PUBLISHED) -> tuple[PublishedHalves, ...]:
    """Load base-to-novel results of eighteen methods on eleven data sets and their average; DCPL has only the average.

    ProCAP's lines are means over seeds 1, 2, 3.
    """
    return tuple(
        PublishedHalves(row["method"], method_key(row["method"]), row["venue"], dataset_name(row["dataset"]),
                        float(row["base"]), float(row["novel"]), float(row["hm"]))
        for row in _rows(folder / "base_to_novel.csv")
    )  # fmt: skip


def halves(key: str, dataset: str) -> PublishedHalves | None:
    """Return the paper's numbers of our method `key` on our data set (or AVERAGE), None if it has none."""
    return next((line for line in base_to_novel() if (line.key, line.dataset) == (key, dataset)), None)


def cross_dataset(folder: Path = PUBLISHED) -> tuple[PublishedTransfer, ...]:
    """Load results of training on all classes of ImageNet with 16 shots; venues are those of the other tables."""
    venues = {line.method: line.venue for line in domain_generalization(folder)}
    venues |= {line.method: line.venue for line in base_to_novel(folder)}
    return tuple(_transfer(row, venues[row["method"]]) for row in _rows(folder / "cross_dataset.csv"))


def domain_generalization(folder: Path = PUBLISHED) -> tuple[PublishedTransfer, ...]:
    """Load results of the same training on ImageNet's four shifts. "DCPL*" is printed with its star."""
    return tuple(_transfer(row, row["venue"]) for row in _rows(folder / "domain_generalization.csv"))


def stability(folder: Path = PUBLISHED) -> tuple[PublishedSpread, ...]:
    """Load ProCAP's spread over seeds. The first row is the average, the mean of the eleven harmonic means."""
    return tuple(
        PublishedSpread(dataset_name(row["dataset"]), *(float(row[f"{name}_{what}"])
                        for name in ("base", "novel", "hm") for what in ("mean", "std")))
        for row in _rows(folder / "seed_stability.csv")
    )  # fmt: skip


def ablation(folder: Path = PUBLISHED) -> tuple[PublishedAblation, ...]:
    """Load harmonic means of seed 1 on four data sets, with parts of ProCAP removed."""
    return tuple(
        PublishedAblation(
            row["variant"],
            METHOD_KEYS.get(row["variant"], "procap"),
            MappingProxyType({name: row[name] == "1" for name in COMPONENTS}),
            _by_dataset(row),
            float(row["average"]),
        )
        for row in _rows(folder / "ablation.csv")
    )


def duration(folder: Path = PUBLISHED) -> tuple[PublishedDuration, ...]:
    """Load ProCAP's results after 10, 25 and 50 epochs."""
    return tuple(
        PublishedDuration(row["method"], METHOD_KEYS[row["method"]], int(row["epochs"]), float(row["base"]),
                          float(row["novel"]), float(row["hm"]))
        for row in _rows(folder / "training_duration.csv")
    )  # fmt: skip


def runtime(folder: Path = PUBLISHED) -> tuple[PublishedRuntime, ...]:
    """Load training time, speed and accuracy on all classes of two data sets, one GPU, mixed precision, seed 1."""
    return tuple(
        PublishedRuntime(row["method"], METHOD_KEYS[row["method"]], dataset_name(row["dataset"]), float(row["time_s"]),
                         float(row["fps"]), float(row["accuracy"]))
        for row in _rows(folder / "runtime.csv")
    )  # fmt: skip


def dataset_sizes(folder: Path = PUBLISHED) -> tuple[PublishedSize, ...]:
    """Load the sizes of the fifteen data sets. A split that the paper leaves empty is not in `counts`."""
    return tuple(
        PublishedSize(
            dataset_name(row["dataset"]),
            int(row["classes"]),
            MappingProxyType({split: _count(row[split])[0] for split in SPLITS if row[split]}),
            MappingProxyType({split: _count(row[split])[1] for split in SPLITS if row[split]}),
            row["description"],
        )
        for row in _rows(folder / "datasets.csv")
    )


def templates(folder: Path = PUBLISHED) -> Mapping[str, tuple[str, str]]:
    """Load the two initial prompts of ProCAP for each data set, by our names."""
    rows = _rows(folder / "templates.csv")
    return MappingProxyType({dataset_name(row["dataset"]): (row["template_1"], row["template_2"]) for row in rows})


@functools.cache
def _names() -> Mapping[str, str]:
    return {printed: name for name, printed in DATASETS.items()}


@functools.cache
def _rows(file: Path) -> tuple[Mapping[str, str], ...]:
    return tuple(MappingProxyType(row) for row in _read(file))


def _read(file: Path) -> Iterator[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        yield from csv.DictReader(lines)


def _by_dataset(row: Mapping[str, str]) -> Mapping[str, float]:
    return MappingProxyType({_names()[title]: float(text) for title, text in row.items() if title in _names()})


def _transfer(row: Mapping[str, str], venue: str) -> PublishedTransfer:
    figures = _by_dataset(row)
    targets = MappingProxyType({name: figure for name, figure in figures.items() if name != "imagenet"})
    method = row["method"]
    return PublishedTransfer(method, method_key(method), venue, figures["imagenet"], targets, float(row["target_mean"]))


def _count(text: str) -> tuple[int, int]:
    """Parse a count and half of its last printed place: "1.28M" is 1,280,000 within 5,000."""
    if not text.endswith("M"):
        return int(text), 0
    unit = 10 ** (6 - len(text[:-1].partition(".")[2]))
    return round(float(text[:-1]) * 1e6), unit // 2
