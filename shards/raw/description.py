"""Read the YAML file that describes a user's data set, and name the line of what is wrong in it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from shards.catalogue import GROUPS, find, parse_name
from shards.errors import DataError, DataUsageError
from shards.manifest import unfit_texts
from shards.resolve import NAME

# A description with the names of thousands of classes is a tenth of this.
LARGEST = 2**20
DEEPEST = 5

SplitName = Literal["train", "val", "test"]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class SplitRule(BaseModel):
    """Which fraction of each class goes where, drawn with `seed`; a set can do without val."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Fraction
    val: Fraction | None = None
    test: Fraction
    seed: int = Field(default=1, ge=0, strict=True)

    @model_validator(mode="after")
    def _whole(self) -> SplitRule:
        total = self.train + (self.val or 0) + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train, val and test add up to {total:g}, not to 1")
        return self


class Description(BaseModel):
    """A user's data set as its YAML file describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: StrictStr
    template: StrictStr
    templates: tuple[StrictStr, ...] = ()
    classes: tuple[StrictStr, ...] | dict[StrictStr | StrictInt, StrictStr] | None = None
    folder: StrictStr | None = None
    table: StrictStr | None = None
    images: StrictStr | None = None
    shards: StrictStr | None = None
    splits: dict[SplitName, StrictStr] | None = None
    split: SplitRule | Literal["test"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Description:
        given = [kind for kind in ("folder", "table", "shards") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of folder, table and shards, not {' and '.join(given) or 'none of them'}")
        for key, kind in (("images", "table"), ("splits", "shards")):
            if getattr(self, key) is not None and given != [kind]:
                raise ValueError(f"{key} goes with {kind}, not with {given[0]}")
        if self.shards and (self.split or isinstance(self.classes, dict)):
            raise ValueError("shards say themselves how they are split and labelled: leave out split, list the classes")
        return self

    @field_validator("template", "templates")
    @classmethod
    def _fit(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for reason in unfit_texts((), (given,) if isinstance(given, str) else given):
            raise ValueError(f"{reason}, as in: a photo of a {{}}.")
        return given

    @property
    def prompts(self) -> tuple[str, ...]:
        """The templates that initialise learned tokens: those given, else the template without its full stop."""
        return self.templates or (self.template.removesuffix("."),)


def read_description(file: Path) -> Description:
    """Read the YAML file of a user's data set. Raises DataError, on one line, with the line that is wrong."""
    text = _text(file)
    lines = _lines(file, text)
    try:
        content = yaml.safe_load(text)
        description = Description.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{file}{_explained(error, lines)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is no YAML that can be read ({' '.join(str(error).split())[:200]})") from None
    _refuse_taken(file, lines, description.name)
    return description


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > LARGEST:
            raise DataError(f"{file} is larger than a description that describes a data set ({LARGEST // 1024} KB)")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"{file} cannot be read ({reason}); name the YAML file of a data set") from None


def _lines(file: Path, text: str) -> dict[tuple[str, ...], int]:
    """Return the line of every key, down to the second level. Refuses YAML features that it does not need."""
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise DataError(f"{file}, line {event.start_mark.line + 1}: YAML aliases (*name) have no use here")
            if depth > DEEPEST:
                raise DataError(f"{file}, line {event.start_mark.line + 1}: nothing in a description is nested so deep")
        top = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise DataError(f"{file}{where}: {error.problem or 'it is no YAML'}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{file} is no YAML that can be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(top, yaml.MappingNode):
        raise DataError(f"{file} holds no keys like name: and folder:")
    found: dict[tuple[str, ...], int] = {}
    for path, node in _keys(top):
        line = node.start_mark.line + 1
        if path in found:
            raise DataError(f"{file}, line {line}: {path[-1]} is there already, in line {found[path]}")
        found[path] = line
    return found


def _keys(top: yaml.MappingNode) -> list[tuple[tuple[str, ...], yaml.Node]]:
    keys: list[tuple[tuple[str, ...], yaml.Node]] = []
    for key, value in top.value:
        keys.append(((str(key.value),), key))
        if isinstance(value, yaml.MappingNode):
            keys += [((str(key.value), str(inner.value)), inner) for inner, _ in value.value]
        elif isinstance(value, yaml.SequenceNode):
            keys += [((str(key.value), str(number)), item) for number, item in enumerate(value.value)]
    return keys


def _explained(error: ValidationError, lines: dict[tuple[str, ...], int]) -> str:
    """Format the first mistake: its line, the key, its value, and what would work."""
    # Report a misspelt key before the key that is missing because of it.
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    path = tuple(str(part) for part in first["loc"])
    # For a key with a union type, pydantic appends the type that it tried to the location.
    key = next((path[:length] for length in (3, 2, 1) if path[:length] in lines), path[:1])
    inner = next(((path[0], part) for part in path[1:] if (path[0], part) in lines), None)
    key = inner or key
    where = f", line {lines[key]}" if key in lines else ""
    if first["type"] == "extra_forbidden":
        known = list((SplitRule if path[0] == "split" else Description).model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"{where}: unknown key '{path[-1]}': {hint}known: {', '.join(known)}"
    if first["type"] == "missing":
        return f"{where}: {path[-1]} is missing" if len(path) > 1 else f": {path[-1]} is missing"
    message = first["msg"].removeprefix("Value error, ")
    value = first["input"]
    given = f" = {value!r:.60}" if isinstance(value, str | int | float) or value is None else ""
    quote = "; put it in quotes" if first["type"] == "string_type" and given and value is not None else ""
    named = f"{'.'.join(key)}{given}: " if key else ""
    return f"{where}: {named}{message[:1].lower()}{message[1:]}{quote}"


def _refuse_taken(file: Path, lines: dict[tuple[str, ...], int], name: str) -> None:
    where = f"{file}, line {lines[('name',)]}: name = {name!r:.60}"
    if not NAME.fullmatch(name) or len(name) > 64 or name.endswith((".", ".yaml", ".yml")) or ".." in name:
        raise DataError(f"{where}: small letters, digits, - and . are allowed, a letter or digit first")
    try:
        taken = find(parse_name(name).base).name
    except DataUsageError:
        taken = name if name in GROUPS else ""
    if taken:
        raise DataError(f"{where}: '{taken}' has a meaning already; choose another name")
