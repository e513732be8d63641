"""Read the YAML file that describes a user's data set, and name the key of what is wrong in it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

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

from shards.catalogue import GROUPS, find_or_none, parse_name
from shards.errors import DataError
from shards.files import require_regular
from shards.names import OWN_NAME, unfit_texts

# Bytes; a description with the names of thousands of classes is a tenth of this.
SIZE_LIMIT = 2**20

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
    def _check_sum(self) -> SplitRule:
        total = self.train + (self.val or 0) + self.test
        if abs(total - 1) > 1e-6:
            raise ValueError(f"train, val and test add up to {total:g}, not to 1")
        return self


class Description(BaseModel):
    """A user's data set as its YAML file describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: StrictStr = Field(description="of the data set: small letters, digits, `-` and `.`")
    template: StrictStr = Field(description="the class prompt; `{}` stands for the class name")
    templates: tuple[StrictStr, ...] = Field(
        default=(), description="more class prompts, see below [default: the template without its full stop]"
    )
    classes: tuple[StrictStr, ...] | dict[StrictStr | StrictInt, StrictStr] | None = Field(
        default=None, description="a list: the order of the labels; a mapping: class names of folders or labels"
    )
    folder: StrictStr | None = Field(default=None, description="the folder of the class folders")
    table: StrictStr | None = Field(default=None, description="instead: a CSV or JSON file of path, label and split")
    images: StrictStr | None = Field(default=None, description="the folder that paths of the table are relative to")
    shards: StrictStr | None = Field(default=None, description="instead: a folder or URL of WebDataset tars")
    splits: dict[SplitName, StrictStr] | None = Field(
        default=None, description="the folder of each split, `{train: training, test: valid}`, if not `train` etc."
    )
    split: SplitRule | Literal["test"] | None = Field(
        default=None, description="a random split by fractions and `seed`, or `test`: all images are for testing"
    )

    @model_validator(mode="after")
    def _check_keys(self) -> Description:
        given = [kind for kind in ("folder", "table", "shards") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of folder, table and shards, not {' and '.join(given) or 'none of them'}")
        for key, kinds in (("images", ("table",)), ("splits", ("folder", "shards"))):
            if getattr(self, key) is not None and given[0] not in kinds:
                raise ValueError(f"{key} goes with {' and '.join(kinds)}, not with {given[0]}")
        if self.shards and (self.split or isinstance(self.classes, dict)):
            raise ValueError("shards define their own split and labels: leave out split, list the classes")
        return self

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not OWN_NAME.fullmatch(name) or len(name) > 64 or name.endswith((".", ".yaml", ".yml")) or ".." in name:
            raise ValueError("small letters, digits, - and . are allowed, a letter or digit first")
        known = find_or_none(parse_name(name)[0])
        if known or name in GROUPS:
            raise ValueError(f"'{known.name if known else name}' has a meaning already; choose another name")
        return name

    @field_validator("template", "templates")
    @classmethod
    def _check_templates(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for reason in unfit_texts((), (given,) if isinstance(given, str) else given):
            raise ValueError(reason)
        return given

    @property
    def prompts(self) -> tuple[str, ...]:
        """The templates that initialise learned tokens: those given, else the template, without their full stops."""
        return tuple(text.removesuffix(".").rstrip() for text in self.templates or (self.template,))


class StrictLoader(yaml.SafeLoader):
    """Load plain YAML and refuse a key that is given twice, of which SafeLoader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if str(key.value) in lines:
                problem = f"{key.value} is given already, in line {lines[str(key.value)]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_description(file: Path) -> Description:
    """Read the YAML file of a user's data set. Raises DataError, on one line, with the key or line that is wrong."""
    try:
        require_regular(file)
        if file.stat().st_size > SIZE_LIMIT:
            raise DataError(f"{file} is larger than the description of a data set ({SIZE_LIMIT // 1024} KB)")
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); name the YAML file of a data set") from None
    except ValueError as error:
        raise DataError(f"{file} is no YAML that can be read ({' '.join(str(error).split())[:200]})") from None
    return parse_description(text, file)


def parse_description(text: str, file: Path) -> Description:
    """Parse the content of the YAML file of a user's data set, as `read_description` does."""
    try:
        content = yaml.load(text, StrictLoader)  # a SafeLoader
        if not isinstance(content, dict):
            raise DataError(f"{file} holds no keys like name: and folder:")
        return Description.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{file}: {_first_mistake(error)}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise DataError(f"{file}{line}: {' '.join((error.problem or 'it is no YAML').split())}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is no YAML that can be read ({' '.join(str(error).split())[:200]})") from None


def _first_mistake(error: ValidationError) -> str:
    """Format the first mistake: the key, its value, and what would work."""
    # Report a misspelt key before the key that is missing because of it.
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    # For a key with a union type, pydantic puts the types that it tried, such as "tuple[str, ...]", into the location.
    is_unknown = first["type"] == "extra_forbidden"
    parts = [str(part) for part in first["loc"] if is_unknown or "[" not in str(part)]
    path = [part if part.isprintable() else repr(part) for part in parts]
    key, value = ".".join(path), first["input"]
    if is_unknown:
        choices = list((SplitRule if path[0] == "split" else Description).model_fields)
        close = difflib.get_close_matches(path[-1], choices, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"unknown key '{path[-1]}': {hint}known: {', '.join(choices)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"].removeprefix("Value error, ")
    given = f" = {value!r:.60}" if isinstance(value, str | int | float) or value is None else ""
    # YAML reads words such as no and 7 as other types than text.
    quotes = "; put it in quotes" if first["type"] == "string_type" else ""
    return f"{key}{given}: {message}{quotes}" if key else message
