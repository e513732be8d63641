"""Import few-shot samples chosen elsewhere: CoOp's cache, or JSON of this program, matched to a packed data set.

CoOp's cache (`split_fewshot/shot_16-seed_1.pkl`) is a pickle, and a pickle can run any code. Two restrictions make this
one harmless: only the opcodes that lists, dicts, text, numbers and plain objects need are known, which leaves out every
opcode that calls something; and the only global name that is resolved is Dassl's record of an image, to a stand-in.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from shards.catalogue import parse_name
from shards.errors import DataError, DataUsageError
from shards.fewshot import FewShotSamples, check_shots, list_split, read_samples
from shards.files import read_file
from shards.names import first_few, join_first
from shards.reader import ShardSet

COOP_NAME = re.compile(r"shot_(\d+)-seed_(\d+)\.pkl")
RECORD = ("dassl.data.datasets.base_dataset", "Datum")
FIELDS = {"_impath": str, "_label": int, "_domain": int, "_classname": str}
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2"),
    *("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "BUILD"),
}
# Bytes; ImageNet at 16 shots is 3 MB.
MAX_SIZE = 16 * 2**20


class CoopRecord(NamedTuple):
    """One image as CoOp names it: an absolute path of the machine that drew it, its label and class name."""

    path: str
    label: int
    classname: str


class _Datum:
    """Stands for Dassl's class of the same name, which is never imported."""


class _CoopUnpickler(pickle._Unpickler):
    """Python's own implementation: that in C reserves memory for as many objects as a file says."""

    dispatch: ClassVar = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in OPCODES
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != RECORD:
            raise ValueError(f"it names {f'{module}.{name}'[:200]!r}, and only {'.'.join(RECORD)} is allowed")
        return _Datum


def read_coop_cache(file: Path) -> dict[str, list[CoopRecord]]:
    """Read the `train` and `val` images of one of CoOp's few-shot caches; anything else is a DataError of one line."""
    try:
        if file.stat().st_size > MAX_SIZE:
            raise ValueError(f"it is larger than {MAX_SIZE // 2**20} MB")
        content = _CoopUnpickler(io.BytesIO(read_file(file))).load()
        if not isinstance(content, dict) or not {"train"} <= set(content) <= {"train", "val"}:
            raise ValueError("it holds no dict of 'train' and 'val'")
        return {split: _coop_records(content.get(split, []), split) for split in ("train", "val")}
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        # An opcode that is not allowed is a KeyError; damaged bytes give nearly any type of error.
        reason = " ".join(str(error).split())[:300]
        if not isinstance(error, ValueError):
            reason = f"it is damaged, or has contents that CoOp's caches never have ({type(error).__name__}: {reason})"
        raise DataError(f"{file} is no few-shot cache of CoOp (split_fewshot/shot_N-seed_N.pkl): {reason}") from None


def _coop_records(rows: object, split: str) -> list[CoopRecord]:
    if not isinstance(rows, list):
        raise ValueError(f"'{split}' is no list")
    # A pickle can name one object any number of times: a small file would otherwise become millions of images.
    if len({id(row) for row in rows}) != len(rows):
        raise ValueError(f"'{split}' holds the same record more than once")
    records = []
    for number, row in enumerate(rows, 1):
        state = vars(row) if isinstance(row, _Datum) else {}
        if set(state) != set(FIELDS):
            raise ValueError(f"entry {number} of '{split}' is no record of an image")
        for field, kind in FIELDS.items():
            if type(state[field]) is not kind:
                raise ValueError(f"{field} of entry {number} of '{split}' is no {kind.__name__}")
        records.append(CoopRecord(state["_impath"], state["_label"], state["_classname"]))
    return records


def import_samples(shards: ShardSet, file: Path, shots: int, seed: int) -> FewShotSamples:
    """Read the few-shot samples in `file` (CoOp's `.pkl` or `.json` of this program) as paths of the packed set.

    Paths of another machine are matched by their longest ending that names an image of the split; labels and class
    names must be those of the set. Raises DataError with counts and the first few that do not fit.
    """
    check_shots(shards, shots)
    records: dict[str, list[CoopRecord]] = {}
    if file.suffix.lower() == ".pkl":
        named = COOP_NAME.fullmatch(file.name)
        if named and (int(named[1]), int(named[2])) != (shots, seed):
            raise DataUsageError(f"{file.name} is named for other samples: give --shots {named[1]} --seed {named[2]}")
        records = read_coop_cache(file)
        if bool(records["val"]) != ("val" in shards.manifest.splits):
            which = ("only", "not") if records["val"] else ("not", "only")
            raise DataError(f"validation images are {which[0]} in {file}, and {which[1]} in the packed '{shards.name}'")
        foreign = {split: [record.path for record in part] for split, part in records.items()}
    elif file.suffix.lower() == ".json":
        samples = read_samples(file)
        if (samples.shots, samples.seed) != (shots, seed):
            raise DataUsageError(f"{file} holds other samples: give --shots {samples.shots} --seed {samples.seed}")
        if samples.dataset not in (shards.name, parse_name(shards.name)[0]):
            raise DataUsageError(f"{file} holds few-shot samples of '{samples.dataset}', not of '{shards.name}'")
        foreign = {"train": list(samples.train), "val": list(samples.val)}
    else:
        raise DataUsageError(
            f"{file}: few-shot samples are imported from CoOp's .pkl cache or from .json of procap data few-shot"
        )
    matched: dict[str, list[str]] = {}
    for split, foreign_paths in foreign.items():
        where = f"{file}, {split}"
        every, numbers = list_split(shards, split)
        labels = dict(zip(every, numbers.tolist(), strict=True))
        paths = matched[split] = _match_paths(foreign_paths, labels, where)
        wrong = [
            f"{record.path!r} is {record.label} '{record.classname}', here {label} '{shards.classnames[label]}'"
            for record, label in zip(records.get(split, ()), (labels[path] for path in paths), strict=False)
            if (record.label, record.classname) != (label, shards.classnames[label])
        ]
        if wrong:
            count = f"{len(wrong)} of {len(paths)} images have another label or class name than in the packed set"
            raise DataError(f"{where}: {count}: {join_first(wrong)}")
        counts, available = Counter(labels[path] for path in paths), Counter(labels.values())
        for label in sorted(available) if split == "train" else ():
            if counts[label] != min(shots, available[label]):
                has = f"class {shards.classnames[label]!r} has {counts[label]} of {available[label]} images"
                raise DataError(f"{where}: {has}: these are not {shots} shots")
    train, val = tuple(matched["train"]), tuple(matched["val"])
    return FewShotSamples(dataset=shards.name, shots=shots, seed=seed, source="imported", train=train, val=val)


def _match_paths(foreign: Sequence[str], packed: Iterable[str], where: str) -> list[str]:
    """Match each foreign path to the packed path that it ends in; all must be found, and none twice."""
    known = set(packed)
    deepest = max((path.count("/") for path in known), default=0) + 1
    paths: list[str] = []
    missing: list[str] = []
    for path in foreign:
        # The longest ending, cut at folders.
        parts = path.split("/")[-deepest:]
        match = next((end for start in range(len(parts)) if (end := "/".join(parts[start:])) in known), None)
        (missing if match is None else paths).append(match or path)
    if missing:
        what = f"{len(missing)} of {len(foreign)} images are not in the packed split: {first_few(missing)}"
        raise DataError(f"{where}: {what}; are they samples of another data set or split?")
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise DataError(f"{where}: {len(twice)} of {len(foreign)} images are listed more than once: {first_few(twice)}")
    return paths
