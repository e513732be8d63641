"""Picks made elsewhere, CoOp's few-shot cache or JSON of this program, matched to the images of a packed set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shards.catalogue import change_of
from shards.coop_cache import CoopPicks, CoopRecord, read_coop_picks
from shards.errors import DataError, DataUsageError
from shards.few_shot_samples import FewShotSamples, Listed, listed, read_picks
from shards.fewshot import check_shots
from shards.reader import ShardSet

COOP_NAME = re.compile(r"shot_(\d+)-seed_(\d+)\.pkl")
NAMED = 3


def imported(shards: ShardSet, file: Path, shots: int, seed: int) -> FewShotSamples:
    """The picks in `file`, as paths of the packed set.

    Paths of another machine are matched by their longest ending that names an image of the split; labels and class
    names must be those of the set. Raises DataError with counts and the first few that do not fit, DataUsageError for
    other shots or another seed than the file says it is of.
    """
    check_shots(shards, shots)
    if file.suffix.lower() == ".json":
        return _from_json(shards, file, shots, seed)
    if file.suffix.lower() != ".pkl":
        raise DataUsageError(f"{file}: picks are imported from CoOp's .pkl cache or from .json of procap data few-shot")
    says = COOP_NAME.fullmatch(file.name)
    if says and (int(says[1]), int(says[2])) != (shots, seed):
        raise DataUsageError(f"{file.name} is named for other picks: give --shots {says[1]} --seed {says[2]}")
    found = read_coop_picks(file)
    return _checked(shards, file, shots, seed, found)


def _checked(shards: ShardSet, file: Path, shots: int, seed: int, found: CoopPicks) -> FewShotSamples:
    if bool(found.val) != ("val" in shards.manifest.splits):
        has, lacks = ("images", "none") if found.val else ("no images", "some")
        raise DataError(f"{file} has {has} for validation and the packed '{shards.name}' has {lacks}")
    matched = []
    for split, records in (("train", found.train), ("val", found.val)):
        where, there = f"{file}, {split}", listed(shards, split)
        paths = _match([record.path for record in records], there, where)
        known = dict(zip(there.paths, there.labels.tolist(), strict=True))
        labels = [known[path] for path in paths]
        _agree(records, "label", [str(label) for label in labels], lambda record: str(record.label), where)
        names = [shards.classnames[label] for label in labels]
        _agree(records, "class name", names, lambda record: record.classname, where)
        if split == "train":
            _check_counts(labels, Counter(known.values()), shots, shards, where)
        matched.append(tuple(paths))
    return FewShotSamples(shards.name, shots, seed, "imported", *matched)


def _from_json(shards: ShardSet, file: Path, shots: int, seed: int) -> FewShotSamples:
    picks = read_picks(file)
    if (picks.shots, picks.seed) != (shots, seed):
        raise DataUsageError(f"{file} holds other picks: give --shots {picks.shots} --seed {picks.seed}")
    if picks.dataset not in (shards.name, change_of(shards.name).base):
        raise DataUsageError(f"{file} holds picks of '{picks.dataset}', not of '{shards.name}'")
    there = listed(shards, "train")
    train = _match(picks.train, there, f"{file}, train")
    val = _match(picks.val, listed(shards, "val"), f"{file}, val")
    labels = dict(zip(there.paths, there.labels.tolist(), strict=True))
    _check_counts([labels[path] for path in train], Counter(labels.values()), shots, shards, f"{file}, train")
    return FewShotSamples(shards.name, shots, seed, "imported", tuple(train), tuple(val))


def _match(foreign: Sequence[str], there: Listed, where: str) -> list[str]:
    """The path of the packed split that each foreign path ends in; every one must be found, and none twice."""
    known = set(there.paths)
    deepest = max((path.count("/") for path in known), default=0) + 1
    found = [_ending(path, known, deepest) for path in foreign]
    missing = [path for path, match in zip(foreign, found, strict=True) if match is None]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(foreign)} images are not in the packed split: {_first(missing)}; "
            "are they picks of another data set or split?"
        )
    paths = [path for path in found if path is not None]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise DataError(f"{where}: {len(twice)} of {len(foreign)} images are picked more than once: {_first(twice)}")
    return paths


def _ending(path: str, known: set[str], deepest: int) -> str | None:
    """The longest ending of a path, cut at its folders, that is known; known paths have at most `deepest` parts."""
    parts = path.split("/")[-deepest:]
    return next((end for start in range(len(parts)) if (end := "/".join(parts[start:])) in known), None)


def _agree(
    records: Sequence[CoopRecord], what: str, here: Sequence[str], value: Callable[[CoopRecord], str], where: str
) -> None:
    wrong = [
        f"{record.path!r} has {value(record)!r}, here {ours!r}"
        for record, ours in zip(records, here, strict=True)
        if value(record) != ours
    ]
    if wrong:
        raise DataError(
            f"{where}: {len(wrong)} of {len(records)} images have another {what} than in the packed set: "
            f"{'; '.join(wrong[:NAMED])}"
        )


def _check_counts(picked: Iterable[int], there: Mapping[int, int], shots: int, shards: ShardSet, where: str) -> None:
    """Every class has `shots` images, or all of its images where it has fewer: else the shots are others than said."""
    counts = Counter(picked)
    absent = [shards.classnames[label] for label in sorted(there) if label not in counts]
    if absent:
        raise DataError(f"{where}: {len(absent)} of {len(there)} classes have no image: {_first(absent)}")
    for label in sorted(there):
        if counts[label] != min(shots, there[label]):
            images = f"{counts[label]} image{'s' * (counts[label] > 1)} of class {shards.classnames[label]!r}"
            raise DataError(f"{where}: {images}: these are not {shots} shots")


def _first(items: Sequence[str]) -> str:
    more = ", ..." if len(items) > NAMED else ""
    return ", ".join(f"{item!r:.200}" for item in items[:NAMED]) + more
