"""Read the YAML file that describes a user's data set, and name the key of what is wrong in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError, field_validator, model_validator

from procap.errors import UserError, describe_invalid
from shards.catalogue import GROUPS, find_or_none
from shards.files import read_regular
from shards.names import PACKED_NAME, unfit_texts
from shards.yaml_files import parse_yaml

Fraction = Annotated[float, Field(gt=0, lt=1)]


class SplitRule(BaseModel):
    """Which fraction of each class goes where, drawn with `seed`; a set can do without val."""

    model_config = {"frozen": True, "extra": "forbid"}

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

    model_config = {"frozen": True, "extra": "forbid"}

    # Strict texts: YAML reads an unquoted `no` as a boolean and `007` as a number, which would become other names.
    name: StrictStr = Field(description="name of the data set: small letters, digits, `-` and `.`")
    template: StrictStr = Field(description="the class prompt; `{}` stands for the class name")
    templates: tuple[StrictStr, ...] = Field(
        default=(), description="initialise ProCAP's tokens; the first is ProCAP's class prompt [default: the template]"
    )
    classes: tuple[StrictStr, ...] | dict[StrictStr | StrictInt, StrictStr] | Literal["none"] | None = Field(
        default=None,
        description="an ordered list of text labels, or of names for 0, 1, ...; or a mapping, label: name; or `none`",
    )
    folder: StrictStr | None = Field(default=None, description="the folder of the class folders")
    table: StrictStr | Annotated[dict[Literal["train", "val", "test"], StrictStr], Field(min_length=1)] | None = Field(
        default=None,
        description="instead of `folder`: a CSV, TSV or JSON file of path, label and split; or {train: FILE, ...}",
    )
    images: StrictStr | None = Field(default=None, description="the folder that paths of the table are relative to")
    split: SplitRule | Literal["test"] | None = Field(
        default=None, description="a random split by fractions and `seed`, or `test`: all images are for testing"
    )
    max_side: StrictInt | None = Field(
        default=None, ge=64, description="JPEG and PNG images are stored with at most so many pixels on the short side"
    )

    @model_validator(mode="after")
    def _check_keys(self) -> Description:
        if (self.folder is None) == (self.table is None):
            raise ValueError("give one of folder and table")
        if self.classes == "none" and (self.table is not None or self.split is not None):
            raise ValueError("classes: none takes a folder, and no table or split")
        return self

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        # `data pack` takes an argument that ends like a YAML file for one.
        if not PACKED_NAME.fullmatch(name) or len(name) > 64 or name.endswith((".", ".yaml", ".yml")) or ".." in name:
            raise ValueError("small letters, digits, - and . are allowed, a letter or digit first")
        known = find_or_none(name)
        if known or name in GROUPS:
            raise ValueError(f"'{known.name if known else name}' is a name of the catalogue; choose another")
        return name

    @field_validator("classes", mode="before")
    @classmethod
    def _check_classes(cls, classes: Any) -> Any:
        names = classes.values() if isinstance(classes, dict) else classes if isinstance(classes, list) else ()
        keys = classes if isinstance(classes, dict) else ()
        wrong = [name for name in names if not isinstance(name, str)] + [key for key in keys if isinstance(key, bool)]
        if wrong:
            raise ValueError(f"a name is read as {wrong[0]!r}: put yes, no, on, off and numbers in quotes")
        return classes

    @field_validator("template", "templates")
    @classmethod
    def _check_templates(cls, templates: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if reason := next(unfit_texts((), (templates,) if isinstance(templates, str) else templates), ""):
            raise ValueError(reason)
        return templates

    @property
    def tables(self) -> dict[str, str]:
        """The tables by split, or one by the empty name."""
        tables = self.table if isinstance(self.table, dict) else {"": self.table} if self.table else {}
        return {str(split): file for split, file in tables.items()}

    @property
    def token_templates(self) -> tuple[str, ...]:
        """The templates that initialise learned tokens, by default the template, without their full stops."""
        return tuple(text.removesuffix(".").rstrip() for text in self.templates or (self.template,))


def read_description(file: Path, text: str = "") -> Description:
    """Read a data set's YAML file, or its `text`. Raises UserError, on one line, with the key or line that is wrong."""
    try:
        # Editors on Windows put a byte order mark at the start.
        return Description.model_validate(parse_yaml(text or read_regular(file).decode("utf-8-sig")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error})") from None
    except ValidationError as error:
        raise UserError(f"{file}: {describe_invalid(error, root='')}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is no YAML that can be read ({' '.join(str(error).split())[:200]})") from None
