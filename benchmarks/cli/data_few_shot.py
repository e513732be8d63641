"""`procap data few-shot`: list the few-shot samples of a data set, write them to a file, or import others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli.flags import OutputFlags, flat
from benchmarks.console.help import PLAIN, examples
from benchmarks.console.output import columns, note, quoted, show, show_json
from procap.errors import UsageError
from shards.fewshot import (
    DIGEST,
    FewShotSamples,
    draw_samples,
    list_split,
    parse_classes,
    read_samples,
    select_labels,
    store_samples,
    write_samples,
)
from shards.home import data_root
from shards.import_samples import import_samples
from shards.manifest import lines_digest
from shards.reader import ShardSet, open_dataset
from shards.resolve import base_name, resolve_dataset

app = typer.Typer(**PLAIN)

SORTED = (
    "ImageNet's lists are its folders: file names are sorted here, CoOp takes them as the disk lists them. "
    "To train on CoOp's own samples, import its cache: --import shot_16-seed_1.pkl"
)


@dataclass(frozen=True)
class Row:
    """One few-shot sample, with the data set's own label of its class."""

    split: str
    path: str
    label: int
    classname: str


@app.command(
    **examples(
        "procap data few-shot shapes --shots 16 --seed 1",
        "procap data few-shot caltech101 --out caltech101-16-1.json",
        "procap data few-shot caltech101 --import caltech-101/split_fewshot/shot_16-seed_1.pkl",
    )
)
@flat
def few_shot(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where the shards are")] = "",
    shots: Annotated[int, typer.Option(metavar="N", min=1, help="training images per class")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="of the draw")] = 1,
    classes: Annotated[str, typer.Option(metavar="all|base|novel", help="whose images are listed")] = "all",
    split_digests: Annotated[bool, typer.Option("--split-digests", help="print digests of whole splits too")] = False,
    source: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="take CoOp's .pkl cache, or .json of --out, instead")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the samples as JSON")] = None,
) -> int:
    """List the few-shot images of a data set, as CoOp's rule draws them, or import those of CoOp itself."""
    root = data_root(data)
    classes = parse_classes(classes)
    if classes != "all" and (out or source):
        raise UsageError(f"--classes {classes}: files hold the samples of all classes, a run takes its half of them")
    if out and out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file, for example samples.json")
    shards = open_dataset(root, resolve_dataset(name, root).name)
    drawn = draw_samples(shards, shots, seed)
    samples = drawn
    if source:
        samples = import_samples(shards, source.expanduser(), shots, seed)
    rows = _rows(shards, samples, classes)
    lines = _summary(shards, samples, classes, rows)
    digests = {split: entry.digest for split, entry in shards.manifest.splits.items()} if split_digests else {}
    show("\n".join([*lines, *(f"split {split}  digest {digest}" for split, digest in digests.items())]))
    if source:
        note(_compare(samples, drawn))
    stored = _store(root, shards, samples, source, out, train_hint=not source or not samples.same_images(drawn))
    if not source:
        table = [(row.split, row.label, row.classname, row.path) for row in rows]
        show("\n" + columns(("split", "label", "class", "path"), table))
    if base_name(shards.name) == "imagenet":
        note(SORTED)
    if output.json:
        document = _document(shards, samples, classes, rows) | {"file": stored, "split_digests": digests}
        show_json(document | ({"equals_rule": samples.same_images(drawn)} if source else {}))
    return 0


def samples_digest(text: str, datasets: Sequence[str], shots: int) -> str:
    """Return the digest for `--few-shot-samples DIGEST|FILE`; empty without the flag.

    Raises UsageError if the samples do not fit the data sets or shots, DataError for a file of another kind.
    """
    if not text:
        return ""
    if len(datasets) != 1:
        what = f"--few-shot-samples {text} are images of one data set"
        raise UsageError(f"{what}, and {len(datasets)} are chosen: one is needed")
    if DIGEST.fullmatch(text):
        return text
    samples = _read(text)
    if samples.dataset != datasets[0]:
        raise UsageError(f"--few-shot-samples {text} are images of '{samples.dataset}', not of '{datasets[0]}'")
    if samples.shots != shots:
        raise UsageError(f"--few-shot-samples {text} are {samples.shots} shots: give --shots {samples.shots}")
    return samples.digest


def store_file(text: str, dataset: str, data: Path) -> None:
    """Store the samples of `--few-shot-samples FILE` beside the packed shards; a digest needs no storing."""
    if text and not DIGEST.fullmatch(text):
        samples = _read(text)
        shards = open_dataset(data, dataset)
        imported = import_samples(shards, Path(text).expanduser(), samples.shots, samples.seed)
        store_samples(shards.folder, imported)


def _read(text: str) -> FewShotSamples:
    file = Path(text).expanduser()
    if file.suffix.lower() == ".pkl":
        command = f"procap data few-shot NAME --import {quoted(file)}"
        raise UsageError(f"--few-shot-samples {text}: import it first, with {command}")
    if not file.exists():
        digest = "the 16 hex digits that procap data few-shot prints"
        raise UsageError(f"--few-shot-samples {text} is neither a file nor {digest}")
    return read_samples(file)


def _store(
    root: Path, shards: ShardSet, samples: FewShotSamples, source: Path | None, out: Path | None, *, train_hint: bool
) -> str | None:
    """Store imported samples and write `--out`; returns the file written last."""
    file = None
    if source:
        file = store_samples(shards.folder, samples)
        flags = f"--datasets {shards.name} --shots {samples.shots} --few-shot-samples {samples.digest}"
        command = f"procap train --methods procap {flags} --data {quoted(root)}"
        note(f"stored in {file}" + (f"; train on them: {command}" if train_hint else ""))
    if out:
        file = out.expanduser()
        write_samples(file, samples)
        note(f"written to {file}")
    return str(file) if file else None


def _rows(shards: ShardSet, samples: FewShotSamples, classes: str) -> list[Row]:
    rows = []
    for split, paths in (("train", samples.train), ("val", samples.val)):
        all_paths, all_labels = list_split(shards, split)
        labels = dict(zip(all_paths, all_labels.tolist(), strict=True))
        rows += [Row(split, path, labels[path], shards.classnames[labels[path]]) for path in paths]
    chosen = set(select_labels((row.label for row in rows if row.split == "train"), classes))
    return [row for row in rows if row.label in chosen]


def _digests(rows: Sequence[Row]) -> dict[str, str]:
    return {split: lines_digest(row.path for row in rows if row.split == split) for split in ("train", "val")}


def _summary(shards: ShardSet, samples: FewShotSamples, classes: str, rows: Sequence[Row]) -> list[str]:
    source = {"coop-rule": "drawn by CoOp's rule", "imported": "imported"}[samples.source]
    lines = [f"{shards.name}: {samples.shots} shots, seed {samples.seed}, {classes} classes, {source}"]
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


def _compare(samples: FewShotSamples, drawn: FewShotSamples) -> str:
    if samples.same_images(drawn):
        return "these are the images that CoOp's rule draws: training needs no --few-shot-samples to use them"
    parts = []
    for split in ("train", "val"):
        ours, theirs = getattr(drawn, split), getattr(samples, split)
        shared = len(set(ours) & set(theirs))
        order = ", in another order" if set(ours) == set(theirs) and ours != theirs else ""
        parts.append(f"{shared:,} of {len(theirs):,} {split} images{order}")
    return f"CoOp's rule draws others here: it shares {' and '.join(parts)}"


def _document(shards: ShardSet, samples: FewShotSamples, classes: str, rows: Sequence[Row]) -> dict[str, Any]:
    digests = _digests(rows)
    labels = dict.fromkeys((row.label, row.classname) for row in rows)
    counts = Counter((row.split, row.label) for row in rows)
    return {
        "dataset": shards.name,
        "shots": samples.shots,
        "seed": samples.seed,
        "classes": classes,
        "source": samples.source,
        "digest": digests["train"],
        "val_digest": digests["val"],
        "counts": [
            {"label": label, "class": name, "train": counts["train", label], "val": counts["val", label]}
            for label, name in sorted(labels)
        ],
        "train": [_entry(row) for row in rows if row.split == "train"],
        "val": [_entry(row) for row in rows if row.split == "val"],
    }


def _entry(row: Row) -> dict[str, Any]:
    return {"path": row.path, "label": row.label, "class": row.classname}
