"""CoOp's few-shot cache, `split_fewshot/shot_16-seed_1.pkl`, read without unpickling.

A pickle is a program. Nothing here runs it: a small interpreter walks its opcodes and knows only those that such a file
needs (lists, one dict, text, whole numbers and Dassl's record of an image). No name in the file is ever looked up, so
no code of it, nor of anything it names, can run; whatever else it holds is refused by the name of opcode or global.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shards.errors import DataError

RECORD = ("dassl.data.datasets.base_dataset", "Datum")
FIELDS = {"_impath": str, "_label": int, "_domain": int, "_classname": str}
SPLITS = ("train", "val")
PROTOCOLS = range(2, 6)
# ImageNet at 16 shots is 3 MB, and pickles are written in batches of 1000 items; the limits bound time and memory.
LARGEST = 16 * 2**20
DEEPEST = 10_000

TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
NUMBERS = {"BININT", "BININT1", "BININT2"}

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class CoopRecord:
    """One image as CoOp names it: an absolute path of the machine that drew it, its label and class name."""

    path: str
    label: int
    classname: str


@dataclass(frozen=True)
class CoopPicks:
    """The images that CoOp drew, in drawn order; `val` is empty for ImageNet, of which CoOp draws none."""

    train: tuple[CoopRecord, ...]
    val: tuple[CoopRecord, ...]


def read_coop_picks(file: Path) -> CoopPicks:
    """Read one of CoOp's few-shot caches.

    Raises DataError in one line for anything that is not exactly such a file.
    """
    try:
        if file.stat().st_size > LARGEST:
            raise _Refused(f"it is larger than {LARGEST // 2**20} MB")
        content = _Reader(file.read_bytes()).run()
        if not isinstance(content, dict) or not {"train"} <= set(content) <= set(SPLITS):
            raise _Refused("it holds no dict of 'train' and 'val'")
        return CoopPicks(*(tuple(_records(content.get(split, []), split)) for split in SPLITS))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except _Refused as error:
        raise DataError(f"{file} is no few-shot cache of CoOp (split_fewshot/shot_N-seed_N.pkl): {error}") from None


def _records(rows: object, split: str) -> Iterator[CoopRecord]:
    if not isinstance(rows, list):
        raise _Refused(f"'{split}' is no list")
    seen: set[int] = set()
    for number, row in enumerate(rows, 1):
        state = row.state if isinstance(row, _Record) else None
        if state is None:
            raise _Refused(f"entry {number} of '{split}' is no record of an image")
        # Two bytes name a record again: a small file would otherwise become millions of images.
        if id(row) in seen:
            raise _Refused(f"entry {number} of '{split}' is the record of an entry before it")
        seen.add(id(row))
        if set(state) != set(FIELDS):
            raise _Refused(f"entry {number} of '{split}' has the fields {', '.join(map(repr, state))[:200]}")
        for field, kind in FIELDS.items():
            if type(state[field]) is not kind:
                raise _Refused(f"{field} of entry {number} of '{split}' is no {kind.__name__}")
        yield CoopRecord(state["_impath"], state["_label"], state["_classname"])


class _Refused(Exception):
    pass


class _Record:
    """One of Dassl's records while it is read: its fields as they are in the file."""

    state: dict[str, Any] | None = None


class _Name:
    """The class of those records, which is never imported."""


class _Mark:
    """Where the items of a list or a dict begin on the stack."""


class _Reader:
    """A stack machine for the opcodes that pickles of such records are made of."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.actions: dict[str, Callable[[Any], None]] = {
            "PROTO": self._protocol,
            "FRAME": lambda _: None,
            "MARK": lambda _: self.stack.append(_Mark()),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_TUPLE": lambda _: self.stack.append(()),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "APPEND": lambda _: self._append([self._pop()]),
            "APPENDS": lambda _: self._append(self._items()),
            "SETITEM": lambda _: self._set([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda _: self._set(self._items()),
            "GLOBAL": lambda name: self._class(*name.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._class(*[self._pop(), self._pop()][::-1]),
            "NEWOBJ": self._new,
            "BUILD": self._build,
        }
        self.actions |= dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._remember)
        self.actions |= dict.fromkeys(("BINGET", "LONG_BINGET"), self._recall)
        self.actions |= dict.fromkeys(TEXT | NUMBERS, self.stack.append)

    def run(self) -> Any:
        """What the pickle describes, made of dicts, lists, text, numbers and `_Record`s; raises _Refused."""
        end = 0
        try:
            for opcode, argument, position in pickletools.genops(io.BytesIO(self.data)):
                if position == 0 and opcode.name != "PROTO":
                    raise _Refused("it is no pickle of protocol 2 to 5")
                if opcode.name == "STOP":
                    end = (position or 0) + 1
                    break
                action = self.actions.get(opcode.name)
                if action is None:
                    raise _Refused(f"opcode {opcode.name} at byte {position} is none that such a file needs")
                action(argument)
                if len(self.stack) > DEEPEST:
                    raise _Refused(f"more than {DEEPEST:,} items are open at byte {position}")
        except (ValueError, IndexError, OverflowError) as error:
            raise _Refused(f"it is damaged ({' '.join(str(error).split())[:200]})") from None
        if len(self.stack) != 1 or end != len(self.data):
            raise _Refused("it is damaged (something is left over at its end)")
        return self.stack[0]

    def _protocol(self, number: int) -> None:
        if number not in PROTOCOLS:
            raise _Refused(f"it is a pickle of protocol {number}, not of 2 to 5")

    def _pop(self, kind: type[Kind] | None = None) -> Any:
        top = self.stack.pop()
        if kind is not None and type(top) is not kind:
            raise _Refused(f"a {kind.__name__.lstrip('_')} was to come where a {type(top).__name__.lstrip('_')} is")
        return top

    def _top(self, kind: type[Kind]) -> Kind:
        top = self._pop(kind)
        self.stack.append(top)
        return top

    def _items(self) -> list[Any]:
        items: list[Any] = []
        while not isinstance(item := self._pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _append(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def _set(self, items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(type(key) is str for key in keys):
            raise _Refused("a dict has keys that are no text")
        self._top(dict).update(zip(keys, values, strict=True))

    def _remember(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def _recall(self, number: int) -> None:
        if number not in self.memo:
            raise _Refused(f"it is damaged (nothing was kept under {number})")
        self.stack.append(self.memo[number])

    def _class(self, module: object, name: object) -> None:
        if (type(module), type(name)) != (str, str):
            raise _Refused("it names a class by something that is no text")
        if (module, name) != RECORD:
            raise _Refused(f"it names {f'{module}.{name}'[:200]!r}, and only {'.'.join(RECORD)} is known here")
        self.stack.append(_Name())

    def _new(self, _: object) -> None:
        if self._pop(tuple):
            raise _Refused("a record is made with arguments")
        self._pop(_Name)
        self.stack.append(_Record())

    def _build(self, _: object) -> None:
        state = self._pop(dict)
        record = self._top(_Record)
        if record.state is not None:
            raise _Refused("a record is filled twice")
        record.state = state
