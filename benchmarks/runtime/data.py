"""Load the packed data sets of the runtime benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.console.packing import ensure_packed
from benchmarks.runtime.settings import SEED, SHOTS
from procap.text import LabelSpace
from runner.setup import label_space
from shards.fewshot import FewShot, Selection, evaluation_split, load_few_shot
from shards.reader import open_dataset
from shards.resolve import resolve_dataset


@dataclass(frozen=True)
class CaseData:
    """One data set of all cases. classes: trained and tested on."""

    name: str
    root: Path
    classes: str
    fewshot: FewShot
    test: Selection
    space: LabelSpace


def load_case_data(name: str, root: Path, classes: str = "base") -> CaseData:
    """Open the data set `name` in `root`, packed if needed, and draw few-shot samples of its `classes`."""
    name = resolve_dataset(name, root).name
    ensure_packed([name], root)
    shards = open_dataset(root, name)
    fewshot = load_few_shot(shards, SHOTS, SEED, classes)
    space = label_space(shards.manifest, fewshot.classnames)
    return CaseData(name, root, classes, fewshot, evaluation_split(shards, classes), space)
