"""Show where evaluations are wrong: accuracy by class, confusions, and the images that most of them get wrong.

All of it comes from result files; the pictures of the images are read from the packed data set, if it is at hand.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.console.output import plural
from benchmarks.experiment.published import display_name
from benchmarks.experiment.titles import choose_reference
from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError
from runner.config import Target

if TYPE_CHECKING:
    import pandas as pd

MAX_TARGETS, MAX_METHODS = 8, 6
"""Test sets of one section, and methods of one table."""
MAX_MATRIX, MAX_PAIRS = 20, 20
"""Classes up to which confusions are a matrix, and rows of the table of pairs that there is for more classes."""
MAX_IMAGES, IMAGES_OF_CLASS, PIXELS = 24, 2, 96
"""Images of a test set, those of one class among them, and their longer side."""
PHOTO = 512
"""The longer side of the picture that an image links to."""


class WrongImage(NamedTuple):
    """An image that is classified wrongly. shown, photo: JPEGs. answers: what was predicted, and by which methods."""

    path: str
    label: str
    answers: str
    shown: bytes
    photo: bytes


class Mistakes(NamedTuple):
    """The mistakes on one test set. text: how the images were chosen, or why none are shown."""

    title: str
    tables: Sequence[Table]
    images: Sequence[WrongImage]
    text: str


def list_mistakes(frame: pd.DataFrame, data: Path | None, reference: str = "") -> list[Mistakes]:
    """Describe the mistakes on at most MAX_TARGETS test sets, the lowest mean accuracy first.

    frame: results with titles in `title`. reference: see `choose_reference`.
    """
    # The only result of an untrained method has a row for each seed.
    frame = frame.drop_duplicates(["title", "path", "target", "evaluation"])
    groups = [rows for _, rows in frame.groupby(["dataset", "classes", "target", "manifest"], sort=False)]
    groups.sort(key=lambda rows: rows.accuracy.mean())
    return [_describe_target(rows, data, reference) for rows in groups[:MAX_TARGETS]]


def _describe_target(frame: pd.DataFrame, data: Path | None, reference: str) -> Mistakes:
    """Describe the mistakes on one test set. frame: its evaluations, of which limited ones count only if all are."""
    frame = _choose_variants(frame if frame.limited.all() else frame[~frame.limited])
    target = Target.parse_unchecked(frame.target.iloc[0])
    by_title = {str(title): rows for title, rows in frame.groupby("title", sort=False)}
    # Pooled over seeds, as the counts of the tables below.
    means = {title: float(rows.correct.sum() / rows.total.sum()) for title, rows in by_title.items()}
    methods = {title: rows.method.iloc[0] for title, rows in by_title.items()}
    first = next(title for title in methods if methods[title] == choose_reference(methods.values(), reference))
    others = sorted((title for title in means if title != first), key=lambda title: -means[title])
    # The reference, then zero-shot CLIP and the best of the others.
    compared = list(dict.fromkeys([first, *(title for title in others if methods[title] == "zeroshot"), *others[:1]]))
    titles = list(dict.fromkeys([*compared, *by_title]))[:MAX_METHODS]
    test_set, counts = _describe_test_set(frame, target), frame.per_class.iloc[0]
    names = [name.replace("_", " ") for name in counts.names or map(str, range(len(counts.total)))]
    name = f"{target.dataset}-{target.classes}"
    tables = [_class_table({title: by_title[title] for title in titles}, names, test_set, name)]
    heading = f"{test_set}: {', '.join(f'{title} {100 * means[title]:.1f} %' for title in compared)}"
    evaluations = frame[frame.title.isin(titles)]
    if evaluations.wrong_images.isna().any():
        return Mistakes(heading, tables, (), "Some evaluations record no predictions of single images.")
    wrong = _list_wrong(evaluations)
    if len(names) <= MAX_MATRIX:
        tables += [
            _matrix(by_title[title], wrong, names, f"{title}: {test_set}", f"{name}-{number}")
            for number, title in enumerate(compared, 1)
        ]
    elif len(wrong):
        tables.append(_pair_table(wrong[wrong.title.isin(compared)], names, test_set, name))
    return Mistakes(heading, tables, *_list_images(evaluations, wrong, names, target, data))


def _choose_variants(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the last variant of each method among those with the most shots."""
    # 0 shots are all images.
    by_shots = frame.iloc[frame.shots.replace(0, frame.shots.max() + 1).argsort(kind="stable")]
    return frame[frame.title.isin(by_shots.groupby("method").title.last())]


def _describe_test_set(frame: pd.DataFrame, target: Target) -> str:
    """Describe the test set, and what was trained on if it is a different data set."""
    first = frame.iloc[0]
    text = f"{display_name(target.dataset)}, {target.classes} classes"
    text += f", {target.split} split" if target.split != "test" else ""
    if (first.dataset, first.classes) != (target.dataset, "base" if target.classes == "novel" else target.classes):
        text += f", trained on {display_name(first.dataset)}, {first.classes} classes"
    return text


def _list_wrong(frame: pd.DataFrame) -> pd.DataFrame:
    """List wrong images of all evaluations: title, position in the target, true and predicted label."""
    import pandas as pd

    parts = [
        pd.DataFrame({"title": row.title, "position": np.flatnonzero(~row.correct_images)}).assign(
            label=row.wrong_images[0], predicted=row.wrong_images[1]
        )
        for row in frame.itertuples()
    ]
    return pd.concat(parts)


def _class_table(by_title: Mapping[str, pd.DataFrame], names: Sequence[str], test_set: str, name: str) -> Table:
    """Make a row for each class that has images, the one with the lowest accuracy of the first title first."""
    import pandas as pd

    shares = []
    for rows in by_title.values():
        correct = np.sum([counts.correct for counts in rows.per_class], axis=0)
        total = np.sum([counts.total for counts in rows.per_class], axis=0)
        shares.append(100 * correct / np.where(total, total, np.nan))
    images = np.max([counts.total for rows in by_title.values() for counts in rows.per_class], axis=0)
    # A row for each class: column 0 has the images, 1 and on the accuracies by title, NaN for a class without images.
    frame = pd.DataFrame([images, *shares], columns=names).T.dropna().sort_values(1, kind="stable")
    rows = [Row((label,), tuple(map(Metric, cells))) for label, *cells in frame.itertuples()]
    columns = (Column("Images", "", 0), *(Column(title, "") for title in by_title))
    title = f"Accuracy by class: {test_set}"
    note = f"Accuracy in % of the images of all seeds, the lowest of {next(iter(by_title))} first."
    return Table(f"classes-{name}", title, ("Class",), columns, rows, (note,))


def _matrix(frame: pd.DataFrame, wrong: pd.DataFrame, names: Sequence[str], test_set: str, name: str) -> Table:
    counts = np.diag(np.sum([classes.correct for classes in frame.per_class], axis=0))
    mistakes = wrong[wrong.title == frame.title.iloc[0]]
    # `counts[...] += 1` would count repeated pairs of classes once.
    np.add.at(counts, (mistakes.label, mistakes.predicted), 1)
    rows = tuple(
        Row((f"{number} {label}",), tuple(map(Metric, row)))
        for number, (label, row) in enumerate(zip(names, counts.tolist(), strict=True), 1)
    )
    columns = [Column(str(number), "", 0) for number in range(1, len(names) + 1)]
    note = f"Rows: true classes; columns: predicted ones. Images of {plural(len(frame), 'evaluation')}."
    title = f"Confusion matrix of {test_set}"
    return Table(f"confusion-{name}", title, ("True class",), columns, rows, (note,), matrix=True)


def _pair_table(wrong: pd.DataFrame, names: Sequence[str], test_set: str, name: str) -> Table:
    # A row for each pair of true and predicted class, a column for each title.
    counts = wrong.groupby(["label", "predicted", "title"]).size().unstack(fill_value=0)
    most = counts.loc[counts.sum(axis=1).sort_values(ascending=False, kind="stable").index[:MAX_PAIRS]]
    rows = tuple(
        Row((names[true], names[predicted]), tuple(map(Metric, numbers)))
        for (true, predicted), numbers in zip(most.index, most.to_numpy().tolist(), strict=True)
    )
    columns = [Column(title, "", 0) for title in most.columns]
    notes = (f"Number of images, over all seeds; the {plural(len(rows), 'pair')} with the highest sums.",)
    labels = ("True class", "Predicted")
    return Table(f"confused-{name}", f"Most confused classes: {test_set}", labels, columns, rows, notes)


def _list_images(
    frame: pd.DataFrame, wrong: pd.DataFrame, names: Sequence[str], target: Target, data: Path | None
) -> tuple[list[WrongImage], str]:
    """List images that most evaluations get wrong, and describe how they were chosen."""
    if wrong.empty:
        return [], "No image is classified wrongly."
    images = wrong.groupby("position").agg(label=("label", "first"), times=("label", "size"))
    often = images.sort_values("times", ascending=False, kind="stable")
    # `head` of groups keeps the order of the frame, the most often wrong images first.
    chosen = often.groupby("label").head(IMAGES_OF_CLASS).head(MAX_IMAGES)
    counted = f"{plural(len(images), 'image')} of {frame.total.max():,}"
    try:
        thumbnails = _read_images(data, target, frame.manifest.iloc[0], chosen.index)
    except (UserError, OSError) as error:
        return [], f"{counted} classified wrongly, not shown: {error}."
    titles = list(dict.fromkeys(frame.title))
    shown = []
    for position, (path, *jpegs) in thumbnails.items():
        answers = wrong[wrong.position == position]
        texts = []
        for label in answers.predicted.value_counts().index:
            gave = set(answers.title[answers.predicted == label])
            texts.append(f"{', '.join(title for title in titles if title in gave)}: {names[label]}")
        shown.append(WrongImage(path, names[images.label[position]], "; ".join(texts), *jpegs))
    text = (
        f"{len(shown)} of {counted} that at least one of {plural(len(frame), 'evaluation')} ({', '.join(titles)}) "
        f"classifies wrongly: true class, then the predictions. At most {IMAGES_OF_CLASS} of each class, those most "
        "often wrong."
    )
    return shown, text


def _read_images(
    data: Path | None, target: Target, manifest: str, positions: Iterable[int]
) -> dict[int, tuple[str, bytes, bytes]]:
    """Read path, thumbnail and picture of images by position in the target.

    Raises UserError if the packed data set is missing or has different content.
    """
    from PIL import Image

    from shards.image_selection import select_class_labels, select_images
    from shards.manifest import read_manifest
    from shards.reader import PackedDataset

    if data is None or not (data / target.dataset).is_dir():
        raise UserError(f"{target.dataset} is not packed in {data}, name its folder with --data")
    # A mirror of a URL is not refreshed: the page needs no network.
    dataset = PackedDataset(data / target.dataset, read_manifest(data / target.dataset))
    if dataset.manifest.digest != manifest:
        raise UserError(f"{target.dataset} in {data} was packed again with other content since")
    listed = dataset.list_images(target.split)
    images = select_images(listed, range(len(listed)), select_class_labels(dataset, target.classes))
    thumbnails = {}
    for position in positions:
        image: Any = images.image(position)
        files = io.BytesIO(), io.BytesIO()
        for file, side in zip(files, (PHOTO, PIXELS), strict=True):
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
            image.save(file, "JPEG", quality=80)
        thumbnails[position] = images.paths[position], files[1].getvalue(), files[0].getvalue()
    return thumbnails
