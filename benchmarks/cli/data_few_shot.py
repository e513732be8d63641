"""`procap data few-shot`: the few-shot images of a data set, listed, written to a file, or brought from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import OutputFlags
from benchmarks.console.output import columns, note, quoted, show, show_json
from procap.errors import UsageError
from shards.few_shot_samples import DIGEST, FewShotSamples, PickSource, drawn, keep, listed, read_picks, write_picks
from shards.fewshot import class_choice, class_half
from shards.home import data_root
from shards.import_samples import imported
from shards.manifest import lines_digest
from shards.reader import ShardSet, open_dataset
from shards.resolve import base_name, known

SORTED = (
    "ImageNet's lists are its folders: file names are sorted here, CoOp takes them as the disk lists them. "
    "To train on CoOp's own draw, import its cache: --import shot_16-seed_1.pkl"
)


@dataclass(frozen=True)
class Picked:
    """One picked image, with the data set's own label of its class."""

    split: str
    path: str
    label: int
    classname: str


@dataclass(frozen=True)
class Request:
    """What `procap data few-shot` is asked for. source: a file to import instead of drawing; out: where JSON goes."""

    shots: int
    seed: int
    classes: str
    split_digests: bool
    source: Path | None
    out: Path | None


def picks(name: str, data: str, request: Request, output: OutputFlags) -> int:
    """See `procap data few-shot --help`."""
    root = data_root(data)
    classes = class_choice(request.classes)
    if classes != "all" and (request.out or request.source):
        raise UsageError(f"--classes {classes}: files hold the picks of all classes, a run takes its half of them")
    if request.out and request.out.is_dir():
        raise UsageError(f"--out {request.out} is a folder; name a file, for example picks.json")
    shards = open_dataset(root, known(name, root).name)
    found, rule = _found(shards, request)
    rows = _rows(shards, found, classes)
    said = _summary(shards, found, classes, rows)
    digests = {split: entry.digest for split, entry in shards.manifest.splits.items()} if request.split_digests else {}
    show("\n".join([*said, *(f"split {split}  digest {digest}" for split, digest in digests.items())]))
    if rule is not None:
        note(_comparison(found, rule))
    stored = _store(root, shards, found, request, needed=rule is None or not found.same_images(rule))
    if not request.source:
        table = [(row.split, row.label, row.classname, row.path) for row in rows]
        show("\n" + columns(("split", "label", "class", "path"), table))
    if base_name(shards.name) == "imagenet":
        note(SORTED)
    if output.json:
        document = _document(shards, found, classes, rows) | {"file": stored, "split_digests": digests}
        show_json(document | ({"equals_rule": found.same_images(rule)} if rule else {}))
    return 0


def picks_digest(text: str, datasets: Sequence[str], shots: int) -> str:
    """The digest that `--few-shot-samples DIGEST|FILE` stands for; empty without the flag.

    Raises UsageError where it does not fit the data sets or the shots, DataError for a file that holds no picks.
    """
    if not text:
        return ""
    if len(datasets) != 1:
        raise UsageError(
            f"--few-shot-samples {text} are images of one data set, and {len(datasets)} are chosen: one is needed"
        )
    if DIGEST.fullmatch(text):
        return text
    picks = _file(text)
    if picks.dataset != datasets[0]:
        raise UsageError(f"--few-shot-samples {text} are images of '{picks.dataset}', not of '{datasets[0]}'")
    if picks.shots != shots:
        raise UsageError(f"--few-shot-samples {text} are {picks.shots} shots: give --shots {picks.shots}")
    return picks.digest


def keep_picks(text: str, dataset: str, data: Path) -> None:
    """Keep the picks of `--few-shot-samples FILE` beside the shards, which must be there; a digest is kept already."""
    if text and not DIGEST.fullmatch(text):
        picks = _file(text)
        shards = open_dataset(data, dataset)
        keep(shards.folder, imported(shards, Path(text).expanduser(), picks.shots, picks.seed))


def _file(text: str) -> FewShotSamples:
    file = Path(text).expanduser()
    if file.suffix.lower() == ".pkl":
        raise UsageError(
            f"--few-shot-samples {text}: import it first, with procap data few-shot NAME --import {quoted(file)}"
        )
    if not file.exists():
        raise UsageError(
            f"--few-shot-samples {text} is neither a file nor the 16 hex digits that procap data few-shot prints"
        )
    return read_picks(file)


def _found(shards: ShardSet, request: Request) -> tuple[FewShotSamples, FewShotSamples | None]:
    """The picks that are asked for, and what the rule draws where they are brought from elsewhere."""
    rule = drawn(shards, request.shots, request.seed)
    if request.source is None:
        return rule, None
    return imported(shards, request.source.expanduser(), request.shots, request.seed), rule


def _store(root: Path, shards: ShardSet, found: FewShotSamples, request: Request, *, needed: bool) -> str | None:
    """Keep imported picks, write what is asked for; gives the file. `needed`: training does not draw them anyway."""
    if request.source:
        file = keep(shards.folder, found)
        flags = (
            f"--datasets {shards.name} --shots {found.shots} --few-shot-samples {found.digest} --data {quoted(root)}"
        )
        note(f"kept in {file}" + (f"; train on them: procap train --methods procap {flags}" if needed else ""))
    if request.out:
        file = request.out.expanduser()
        write_picks(file, found)
        note(f"written to {file}")
    return str(file) if request.source or request.out else None


def _rows(shards: ShardSet, found: FewShotSamples, classes: str) -> list[Picked]:
    rows = []
    for split, paths in (("train", found.train), ("val", found.val)):
        there = listed(shards, split)
        labels = dict(zip(there.paths, there.labels.tolist(), strict=True))
        rows += [Picked(split, path, labels[path], shards.classnames[labels[path]]) for path in paths]
    kept = set(class_half((row.label for row in rows if row.split == "train"), classes))
    return [row for row in rows if row.label in kept]


def _digests(rows: Sequence[Picked]) -> dict[str, str]:
    return {split: lines_digest(row.path for row in rows if row.split == split) for split in ("train", "val")}


def _summary(shards: ShardSet, found: FewShotSamples, classes: str, rows: Sequence[Picked]) -> list[str]:
    told: dict[PickSource, str] = {"coop-rule": "drawn by CoOp's rule", "imported": "imported"}
    lines = [f"{shards.name}: {found.shots} shots, seed {found.seed}, {classes} classes, {told[found.source]}"]
    digests = _digests(rows)
    for split in ("train", "val"):
        counts = Counter((row.label, row.classname) for row in rows if row.split == split)
        if not counts:
            lines.append(f"{split:<5}  no images")
            continue
        each = set(counts.values())
        of_each = f"{each.pop()} of each" if len(each) == 1 else f"{min(each)} to {max(each)} of each"
        lines.append(
            f"{split:<5}  {sum(counts.values()):,} images of {len(counts)} classes, {of_each}; digest {digests[split]}"
        )
        usual = max(counts.values())
        lines += [f"       {count} of {name} ({label})" for (label, name), count in counts.items() if count != usual]
    return lines


def _comparison(found: FewShotSamples, rule: FewShotSamples) -> str:
    if found.same_images(rule):
        return "these are the images that CoOp's rule draws: training needs no --few-shot-samples to use them"
    parts = []
    for split in ("train", "val"):
        ours, theirs = getattr(rule, split), getattr(found, split)
        shared = len(set(ours) & set(theirs))
        order = ", in another order" if set(ours) == set(theirs) and ours != theirs else ""
        parts.append(f"{shared:,} of {len(theirs):,} {split} images{order}")
    return f"CoOp's rule draws others here: it shares {' and '.join(parts)}"


def _document(shards: ShardSet, found: FewShotSamples, classes: str, rows: Sequence[Picked]) -> dict[str, Any]:
    digests = _digests(rows)
    labels = dict.fromkeys((row.label, row.classname) for row in rows)
    counts = Counter((row.split, row.label) for row in rows)
    return {
        "dataset": shards.name,
        "shots": found.shots,
        "seed": found.seed,
        "classes": classes,
        "source": found.source,
        "digest": digests["train"],
        "val_digest": digests["val"],
        "counts": [
            {"label": label, "class": name, "train": counts["train", label], "val": counts["val", label]}
            for label, name in sorted(labels)
        ],
        "train": [_entry(row) for row in rows if row.split == "train"],
        "val": [_entry(row) for row in rows if row.split == "val"],
    }


def _entry(row: Picked) -> dict[str, Any]:
    return {"path": row.path, "label": row.label, "class": row.classname}
