"""`procap data`: pack data sets into shards, check what is packed, look at it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flags import Output, data_home
from benchmarks.output import columns, note, plural, quoted, show_json
from benchmarks.output import show as show_text
from benchmarks.plan import data_states
from procap.errors import UsageError
from shards.catalogue import CATALOGUE, find
from shards.errors import DataError
from shards.manifest import FILE, Manifest

PICTURES = (".png", ".pdf", ".svg", ".jpg")


def ensure_packed(names: Iterable[str], data_root: Path) -> None:
    """Pack the generated and the bundled data sets among `names` that are not there yet, and say so.

    Raises DataError for one whose raw files only the user has.
    """
    for name in names:
        dataset = find(name)
        if (data_root / dataset.name / FILE).exists():
            continue
        if dataset.source == "folder":
            command = f"procap data pack {dataset.name} --data {quoted(data_root)}"
            raise DataError(f"'{dataset.name}' is not packed in {data_root}; pack it: {command}")
        note(f"packing {dataset.name} into {data_root} ({'drawn' if dataset.source == 'world' else 'bundled'}, once)")
        pack_one(dataset.name, data_root)


def pack_one(name: str, data_root: Path, *, force: bool = False, quiet: bool = False) -> Manifest:
    """Pack one data set under a progress bar."""
    from runner.progress import ProgressDisplay
    from shards.pack import pack as pack_dataset

    counts = find(name).counts
    before: dict[str, int] = {}
    with ProgressDisplay(f"packing {name}", sum(counts.values()), unit="images", quiet=quiet) as display:

        def progress(split: str, done: int, total: int) -> None:
            before[split] = done
            display.update(sum(before.values()), split=split)

        return pack_dataset(name, data_root, force=force, on_progress=progress)


def pack(names: Sequence[str], data: Path | None, force: bool, dry_run: bool, output: Output) -> int:
    """See `procap data pack --help`."""
    root = _root(data)
    wanted = _wanted(names, [name for name, dataset in CATALOGUE.items() if dataset.source != "folder"])
    if dry_run:
        states = data_states(wanted, root)
        show_text(columns(("data set", "now in " + str(root)), list(states.items())) + "\nNothing was written.")
        if output.json:
            show_json({"data": str(root), "datasets": states})
        return 0
    packed = {name: pack_one(name, root, force=force) for name in wanted}
    rows = [
        (
            name,
            len(manifest.classnames),
            sum(split.count for split in manifest.splits.values()),
            sum(len(split.shards) for split in manifest.splits.values()),
            manifest.digest,
        )
        for name, manifest in packed.items()
    ]
    show_text(columns(("data set", "classes", "images", "shards", "digest"), rows))
    note(f"packed in {root}; look at one: procap data show {wanted[0]} --data {quoted(root)}")
    if output.json:
        show_json({"data": str(root), "datasets": {name: manifest.digest for name, manifest in packed.items()}})
    return 0


def check(names: Sequence[str], data: Path | None, output: Output) -> int:
    """Exit code 1 when anything is wrong; see `procap data check --help`."""
    from shards.reader import verify

    root = _root(data)
    there = sorted(path.parent.name for path in root.glob(f"*/{FILE}")) if root.is_dir() else []
    wanted = _wanted(names, there, catalogue_only=False)
    if not wanted:
        raise DataError(f"nothing is packed in {root}; pack something: procap data pack shapes --data {quoted(root)}")
    rows: list[tuple[object, ...]] = []
    problems: dict[str, list[str]] = {}
    for name in wanted:
        report = verify(root, name)
        found = [*report.problems, *(problem for split in report.splits for problem in split.problems)]
        problems[name] = found
        for split in report.splits:
            verdict = "ok" if not split.problems else plural(len(split.problems), "problem")
            rows.append(
                (name, split.name, f"{split.readable}/{split.images}", f"{split.shards_found}/{split.shards}", verdict)
            )
        if not report.splits:
            rows.append((name, "-", "-", "-", "unreadable"))
    show_text(columns(("data set", "split", "images readable", "shards found", "verdict"), rows))
    broken = {name: found for name, found in problems.items() if found}
    for found in broken.values():
        for problem in found:
            note(f"procap: {problem}")
    if broken:
        note(f"procap: pack again what is broken: procap data pack {' '.join(broken)} --force --data {quoted(root)}")
    if output.json:
        document: dict[str, Any] = {"data": str(root), "ok": not broken, "problems": problems}
        show_json(document)
    return 1 if broken else 0


def show(name: str, data: Path | None, split: str, out: Path | None, output: Output) -> int:
    """See `procap data show --help`."""
    from shards.show import contact_sheet

    root = _root(data)
    dataset = find(name).name if not (root / name / FILE).exists() else name
    out = out or Path(f"{dataset}-{split}.png")
    if out.suffix.lower() not in PICTURES:
        raise UsageError(f"--out {out}: a picture's name ends in {', '.join(PICTURES)}")
    picture = contact_sheet(root, dataset, split, out)
    show_text(str(picture))
    if output.json:
        show_json({"dataset": dataset, "split": split, "picture": str(picture)})
    return 0


def _root(data: Path | None) -> Path:
    root = (data or data_home()).expanduser()
    if root.exists() and not root.is_dir():
        raise UsageError(f"--data {root} is a file; name a folder")
    return root


def _wanted(names: Sequence[str], everything: Sequence[str], *, catalogue_only: bool = True) -> list[str]:
    given = [part.strip() for name in names for part in name.split(",") if part.strip()]
    if not given:
        raise UsageError("no data set is named; for example shapes, or all")
    if "all" in given:
        return list(everything)
    return list(dict.fromkeys(n if not catalogue_only and n in everything else find(n).name for n in given))
