"""Load the tables of the ProCAP paper from the CSV files in this folder, with our names for data sets and methods.

`load_rows` returns one object per row. Numbers are percentages with two decimals as printed unless noted. `method` is
the printed name and `key` our name of the method, None for those that are not implemented here. `dataset` is our name
of a data set, or AVERAGE.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from procap.methods import METHODS, title_and_colour
from runner.config import Target
from shards.catalogue import PUBLISHED as PUBLISHED_SETS

PUBLISHED = Path(__file__).parent
AVERAGE = "Average"
"""Used as the data set's name in rows of averages; real data set names are lower case."""

DATASETS: Mapping[str, str] = {dataset.name: dataset.title for dataset in PUBLISHED_SETS}
"""The paper's name of a data set, by our name."""

METHOD_KEYS: Mapping[str, str] = {
    **{title_and_colour(key)[0]: key for key in METHODS},
    "CLIP": "zeroshot",
    "MaPLe-style": "maple",
    "MMLoP": "mmlop",
    "ProCAP (Full)": "procap",
}
"""Our name of a method, by the paper's. "MaPLe-style", which the paper does not define, is read as MaPLe."""

PROMPT_PICTURE: Mapping[str, Mapping[str, float]] = {"eurosat": {"maple": 96.86, "procap": 98.43}}
"""Base accuracies in the caption of the figure of learned prompts, by data set and method.

The first belongs to "the trained baseline", which the figure does not name; the figures next to it have MaPLe.
"""

TO_SOURCE = {"by_dataset": "targets", "ImageNet": "source"}
RENAMED: Mapping[str, Mapping[str, str]] = {
    "seed_stability": {"base_mean": "base", "novel_mean": "novel", "hm_mean": "hm"},
    "cross_dataset": TO_SOURCE,
    "domain_generalization": TO_SOURCE,
    "ablation": {"by_dataset": "hm"},
    "runtime": {"time_s": "train_seconds", "fps": "images_per_second"},
}
"""Our names of columns, by table. by_dataset: the attribute for the columns of data sets."""
UNPRINTED: Mapping[str, Mapping[str, Any]] = {
    "base_to_novel": {"epochs": 0},
    "seed_stability": {"epochs": 0, "method": "ProCAP", "venue": "Ours"},
    "training_duration": {"dataset": AVERAGE, "venue": "Ours"},
}
"""Columns that a table does not need to print, with their only value."""

COMPONENTS = ("cross_attention", "gaussian", "kl", "l2", "infonce")


def display_name(dataset: str) -> str:
    """Return the paper's name of a data set; AVERAGE and other data sets keep their name."""
    return DATASETS.get(dataset, dataset)


def title_target(name: str) -> str:
    """Return a target as tables name it: the data set, and its classes if they are not all."""
    target = Target.parse_unchecked(name)
    return display_name(target.dataset) + f" {target.classes}" * (target.classes != "all")


def load_rows(table: str, folder: Path = PUBLISHED) -> list[Any]:
    """Load a table of the paper; none for an empty name.

    base_to_novel: method, key, venue ("Ours" for ProCAP), dataset, base, novel, hm; of DCPL only the average is printed
    seed_stability: these of ProCAP, and base_std, novel_std, hm_std; the average's hm is the mean of hms
    training_duration: these of the average, and epochs (0 in the two others)
    cross_dataset: method, key, venue, source (accuracy on ImageNet), targets (by data set), target_mean
    domain_generalization: the same for ImageNet's four shifts; "DCPL*" is printed with its star
    ablation: variant, each of COMPONENTS (0 or 1), hm (by data set), average
    runtime: dataset, method, key, train_seconds, images_per_second, accuracy: one GPU, mixed precision, seed 1
    """
    rows = _read(folder / f"{table}.csv", **RENAMED.get(table, {})) if table else []
    if table == "cross_dataset":
        # Venues are printed in the other tables only.
        others = (row for name in ("base_to_novel", "domain_generalization") for row in load_rows(name, folder))
        venues = {row.method: row.venue for row in others}
        for row in rows:
            row.venue = venues[row.method]
    return rows


def table1_methods() -> list[str]:
    """List the methods of the main table that this program has, in its order, and three that the text compares."""
    return list(dict.fromkeys([*(row.key for row in load_rows("base_to_novel") if row.key), "mocoop", "caspl", "ipo"]))


@functools.cache
def _read(file: Path, by_dataset: str = "", **names: str) -> list[Any]:
    """Read one table. by_dataset: attribute for the columns of data sets. names: our names of other columns."""
    ours = {printed: name for name, printed in DATASETS.items()}
    rows = []
    # Not by pandas, whose import takes as long as the rest of planning a run.
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        values: dict[str, Any] = {by_dataset: {}} if by_dataset else {}
        values |= UNPRINTED.get(file.stem, {})
        for column, text in row.items():
            value = _parse_cell(text)
            if column in ours and column not in names:
                values[by_dataset][ours[column]] = value
            else:
                values[names.get(column, column)] = ours.get(text, value) if column == "dataset" else value
        if "method" in values:
            values["key"] = METHOD_KEYS.get(values["method"])
        rows.append(SimpleNamespace(**values))
    return rows


def _parse_cell(text: str) -> float | str:
    """Parse a whole or other number; an empty cell is NaN, any other text stays as it is."""
    try:
        return int(text) if text.isdigit() else float(text or "nan")
    except ValueError:
        return text
