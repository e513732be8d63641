"""Show where evaluations are wrong: accuracy by class, confusions, and the images that most of them get wrong.

All of it comes from result files; the pictures of the images are read from the packed data set, if it is at hand.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.console.output import plural
from benchmarks.results.metrics import Metric, make_metric
from benchmarks.results.published.tables import display_name
from benchmarks.tables.calibration import choose_compared
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError
from runner.config import Target
from runner.results import unpack_bits
from shards.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

MAX_TARGETS, MAX_METHODS = 8, 6
"""Test sets of one section, and methods of one table; flags that select runs make a page of others."""
MAX_MATRIX, MAX_PAIRS = 20, 20
"""Classes up to which confusions are a matrix, and rows of the table of pairs that there is for more classes."""
MAX_IMAGES, IMAGES_OF_CLASS, PIXELS = 24, 2, 96
"""Images of a test set, those of one class among them, and their longer side."""


@dataclass(frozen=True)
class WrongImage:
    """An image that is classified wrongly. shown: a JPEG. answers: what was predicted, and how often."""

    path: str
    label: str
    answers: str
    shown: bytes


@dataclass(frozen=True)
class Mistakes:
    """The mistakes on one test set. text: how the images were chosen, or why none are shown."""

    title: str
    tables: Sequence[Table]
    images: Sequence[WrongImage]
    text: str


def list_mistakes(frame: pd.DataFrame, data: Path | None) -> tuple[list[Mistakes], str]:
    """Describe the mistakes on each of the first MAX_TARGETS test sets, and how to see those on others.

    frame: results with titles in `title`.
    """
    frame = frame.drop_duplicates(["title", "path", "target", "evaluation"])
    groups = [own for _, own in frame.groupby(["dataset", "classes", "target", "manifest"], sort=False)]
    further = dict.fromkeys(str(own.dataset.iloc[0]) for own in groups[MAX_TARGETS:])
    left = f"The first {MAX_TARGETS} of {len(groups)} test sets; for others: procap report --datasets"
    return (
        [_describe_target(own, data) for own in groups[:MAX_TARGETS]],
        f"{left} {','.join(further)}" if further else "",
    )


def _describe_target(frame: pd.DataFrame, data: Path | None) -> Mistakes:
    """Describe the mistakes on one test set. frame: its evaluations, of which limited ones count only if all are."""
    frame = frame if frame.limited.all() else frame[~frame.limited]
    first = frame.iloc[0]
    titles = {str(title): own for title, own in frame.groupby("title", sort=False)}
    means = {title: float(own.correct.sum() / own.total.sum()) for title, own in titles.items()}
    chosen = choose_compared(means, {title: own.method.iloc[0] for title, own in titles.items()})
    others = [title for title in titles if title not in chosen]
    shown = {title: titles[title] for title in [*chosen, *others][:MAX_METHODS]}
    target = Target.parse_unchecked(first.target)
    where = f"{display_name(target.dataset)}, {target.classes} classes"
    where += f", {target.split} split" if target.split != "test" else ""
    where += f", trained on {display_name(first.dataset)}" if first.dataset != target.dataset else ""
    if (first.classes, target.classes) not in (("base", "novel"), (target.classes, first.classes)):
        where += f", trained on {first.classes} classes"
    names = [name.replace("_", " ") for name in first.per_class.names or map(str, range(len(first.per_class.total)))]
    name = f"{target.dataset}-{target.classes}"
    tables = [_class_table(shown, names, where, name)]
    stored = frame[frame.title.isin(list(shown))]
    stored = stored[stored.wrong_images.notna() & stored.correct_bits.notna()]
    wrong = _list_wrong(stored)
    compared = {title: own for title in chosen if len(own := stored[stored.title == title]) == len(titles[title])}
    if len(names) <= MAX_MATRIX:
        tables += [_matrix(own, wrong, names, f"{title}: {where}", name) for title, own in compared.items()]
    elif compared and len(wrong):
        tables.append(_pair_table(compared, wrong, names, where, name))
    heading = f"{where}: {', '.join(f'{title} {100 * means[title]:.1f} %' for title in chosen)}"
    if len(stored) < sum(map(len, shown.values())):
        why = "Some evaluations were made by an older version, without the predictions of single images"
        return Mistakes(heading, tables, (), f"{why}: procap eval RUN --force adds them.")
    return Mistakes(heading, tables, *_list_images(stored, wrong, names, target, data))


def _list_wrong(frame: pd.DataFrame) -> pd.DataFrame:
    """List wrong images of all evaluations: title, place in the target, true and predicted label."""
    import pandas as pd

    parts = [
        pd.DataFrame({"title": one.title, "place": np.flatnonzero(~unpack_bits(one.correct_bits, one.total))}).assign(
            label=one.wrong_images[0], predicted=one.wrong_images[1]
        )
        for one in frame.itertuples()
    ]
    return pd.concat(parts) if parts else pd.DataFrame(columns=["title", "place", "label", "predicted"])


def _class_table(titles: Mapping[str, pd.DataFrame], names: Sequence[str], where: str, name: str) -> Table:
    """Make a row for each class, the one with the lowest accuracy of the first title first."""
    from scipy.stats import binomtest

    accuracies = {title: _average_classes(own) for title, own in titles.items()}
    images = np.max([one.total for own in titles.values() for one in own.per_class], axis=0).tolist()
    rows = []
    for place, label in enumerate(names):
        reference, *others = (metrics[place] for metrics in accuracies.values())
        if reference is not None:
            right = round(reference.mean / 100 * images[place])
            low, high = binomtest(right, images[place]).proportion_ci(method="wilson")
            interval = f"{100 * low:.1f} to {100 * high:.1f}"
            rows.append(Row((label,), (Metric(images[place]), reference, interval, *others)))
    rows.sort(key=lambda row: row.cells[1].mean if isinstance(row.cells[1], Metric) else 0.0)
    first, *rest = titles
    titled = [Column(title, "") for title in (first, "95 % interval", *rest)]
    columns = (Column("Images", "", 0), *titled)
    note = (
        f"Accuracy in %, lowest first. The interval is Wilson's for {first}, over the images of the class: it does not "
        "include other trainings."
    )
    return Table(f"classes-{name}", f"Accuracy by class: {where}", ("Class",), columns, tuple(rows), (note,))


def _average_classes(frame: pd.DataFrame) -> list[Metric | None]:
    """Average the accuracy of each class over seeds; None where it has no images."""
    own = frame.sort_values("seed")
    counts = [np.array([one.correct, one.total], float) for one in own.per_class]
    columns = np.array([100 * correct / np.where(total, total, np.nan) for correct, total in counts]).T
    # A method without training has one run, which counts for all seeds.
    seeds, limited = tuple(map(int, own.seed[own.epochs > 0])), bool(own.limited.all())
    metrics = [make_metric(values.tolist(), seeds, limited) for values in columns]
    return [None if np.isnan(one.mean) else one if seeds else Metric(one.mean, limited=limited) for one in metrics]


def _matrix(frame: pd.DataFrame, wrong: pd.DataFrame, names: Sequence[str], where: str, name: str) -> Table:
    """Make the confusion matrix of the evaluations of one method, with a row for each true class."""
    counts = np.diag(np.sum([one.correct for one in frame.per_class], axis=0))
    own = wrong[wrong.title == frame.title.iloc[0]]
    np.add.at(counts, (own.label, own.predicted), 1)
    short = len(names) <= 6
    rows = tuple(
        Row((label if short else f"{place} {label}",), tuple(Metric(count) for count in row.tolist()))
        for place, (label, row) in enumerate(zip(names, counts, strict=True), 1)
    )
    columns = tuple(Column(label if short else str(place), "", 0) for place, label in enumerate(names, 1))
    order = "" if short else ", numbered as the rows"
    note = (
        f"Rows: true classes; columns: predicted ones{order}. Number of images, {_count_text(frame)}; the shade is its "
        "share of the row."
    )
    return Table(
        f"confusion-{name}", f"Confusion matrix of {where}", ("True class",), columns, rows, (note,), matrix=True
    )


def _pair_table(
    titles: Mapping[str, pd.DataFrame], wrong: pd.DataFrame, names: Sequence[str], where: str, name: str
) -> Table:
    """Make a row for each of the most frequent pairs of a true and a wrongly predicted class."""
    import pandas as pd

    counts = wrong.groupby(["label", "predicted", "title"]).size().unstack(fill_value=0)
    labels = counts.index.get_level_values("label")
    totals = {title: np.sum([one.total for one in own.per_class], axis=0)[labels] for title, own in titles.items()}
    shares = pd.DataFrame({title: 100 * counts.get(title, 0) / own for title, own in totals.items()}, counts.index)
    most = shares.sum(axis=1).sort_values(ascending=False, kind="stable").index[:MAX_PAIRS]
    rows = tuple(
        Row((names[true], names[other]), tuple(map(Metric, shares.loc[(true, other)].tolist()))) for true, other in most
    )
    columns = tuple(Column(title, "", 1) for title in titles)
    note = (
        f"% of the images of the true class, {_count_text(next(iter(titles.values())))}. The {len(rows)} pairs with "
        "the highest sum over the methods."
    )
    heads = ("True class", "Predicted")
    return Table(f"confused-{name}", f"Most confused classes: {where}", heads, columns, rows, (note,))


def _count_text(frame: pd.DataFrame) -> str:
    """Describe what is counted: "n = 120", "n = 3 x 120 (seeds 1, 2, 3)"."""
    if len(frame) == 1:
        return f"n = {frame.total.iloc[0]:,}"
    return f"n = {len(frame)} x {frame.total.max():,} (seeds {', '.join(map(str, sorted(set(frame.seed))))})"


def _list_images(
    frame: pd.DataFrame, wrong: pd.DataFrame, names: Sequence[str], target: Target, data: Path | None
) -> tuple[list[WrongImage], str]:
    """List images that most evaluations get wrong, and describe how they were chosen."""
    images = wrong.groupby("place").agg(label=("label", "first"), times=("label", "size"))
    if images.empty:
        return [], "No image is classified wrongly."
    images = images.sort_values("times", ascending=False, kind="stable")
    by_class = images.groupby("label").times
    images = images.assign(turn=by_class.cumcount(), mistakes=by_class.transform("sum"))
    chosen = images[images.turn < IMAGES_OF_CLASS].sort_values(
        ["turn", "mistakes"], ascending=[True, False], kind="stable"
    )
    try:
        found = _read_images(data, target, frame.manifest.iloc[0], chosen.label.head(MAX_IMAGES).to_dict())
    except (UserError, DataError, OSError) as error:
        return [], f"{plural(len(images), 'image')} classified wrongly, not shown: {error}."
    count, titles = len(frame), list(dict.fromkeys(frame.title))
    shown = []
    for place, (path, jpeg) in found.items():
        own = wrong[wrong.place == place]
        texts = []
        for other, times in own.predicted.value_counts().head(2).items():
            gave = [title for title in titles if title in set(own.title[own.predicted == other])]
            by = f"{', '.join(gave)}: " if len(titles) > 1 else ""
            texts.append(f"{by}{names[other]}{f' ({times} of {count})' * (count > 1 and not by)}")
        shown.append(WrongImage(path, names[images.label[place]], "; ".join(texts), jpeg))
    by = f" by at least one of {count} evaluations ({', '.join(titles)})" if count > 1 else ""
    who = ", and by which methods (with any seed)" if len(titles) > 1 else ""
    text = (
        f"{len(shown)} of {plural(len(images), 'image')} that are classified wrongly{by}, out of "
        f"{frame.total.max():,}: true class, then what was predicted{who}. Of each class at most {IMAGES_OF_CLASS}, "
        f"{'those most often wrong, ' * (count > 1)}beginning with the class of most mistakes."
    )
    return shown, text


def _read_images(
    data: Path | None, target: Target, manifest: str, labels: Mapping[int, int]
) -> dict[int, tuple[str, bytes]]:
    """Read path and thumbnail of images by position in the target. labels: by position, compared with the data set's.

    Raises UserError or DataError if the packed data set is not at hand, or another one.
    """
    from PIL import Image

    from shards.fewshot import evaluation_labels, select_images
    from shards.manifest import read_manifest
    from shards.reader import ShardSet

    if data is None or not (data / target.dataset).is_dir():
        raise UserError(f"{target.dataset} is not packed in {data}, name its folder with --data")
    # A mirror of a URL is not refreshed: the page needs no network.
    shards = ShardSet(data / target.dataset, read_manifest(data / target.dataset, target.dataset))
    if shards.manifest.digest != manifest:
        raise UserError(f"{target.dataset} in {data} was packed again with other content since")
    shards.require(target.split)
    split = shards.unverified(target.split)
    images = select_images(split, range(len(split)), evaluation_labels(shards, target.classes))
    found = {}
    for place, label in labels.items():
        if images.labels[place] != label:
            raise UserError(f"{target.dataset} in {data} has other images than were evaluated")
        image: Any = images.image(place)
        image.thumbnail((PIXELS, PIXELS), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=80)
        found[place] = images.paths[place], file.getvalue()
    return found
