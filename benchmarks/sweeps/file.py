"""Read the YAML file of a sweep: its keys are the flags of the command line, without dashes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from benchmarks.console.errors import one_line
from benchmarks.console.parse import check_arguments
from procap.errors import UsageError, unknown_name
from procap.recipe import format_value

MAPPINGS = ("param", "option", "recipe_field")
"""Keys with a mapping of fields to values; each item corresponds to one flag."""


def load_file(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of `file` the defaults of the command's flags; typer calls this for the argument FILE.

    Raises UsageError for a file that is not there or not YAML, and for unknown keys.
    """
    if file is not None:
        given = {str(key).replace("-", "_"): value for key, value in read_yaml(file).items() if value is not None}
        values = {name: _to_flag(name, value) for name, value in given.items()}
        known = {str(parameter.name) for parameter in context.command.params}
        for name in values.keys() - known:
            raise unknown_name(f"key in {file}", name, known)
        for name, value in values.items():
            check_arguments([f"--{name}={one}" for one in (value if isinstance(value, list) else [value])], {})
        context.default_map = {"name": file.stem} | values
    return file


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """Read a mapping. Raises UsageError for a file that cannot be read, is not YAML, or has a key twice."""
    import yaml

    from shards.raw.description import StrictLoader

    class Loader(StrictLoader):
        """Reads 1e-5 as a number, as YAML 1.2 does."""

    number = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{file} is not valid YAML{where}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid YAML: {one_line(str(error))}") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{file}: keys and values are needed, as in `methods: procap`")
    return found


def _to_flag(name: str, value: Any) -> str | bool | list[str]:
    """Convert a value of the file to what the flag takes."""
    if name in MAPPINGS and isinstance(value, Mapping):
        return [f"{field}={_to_text(one, name == 'param')}" for field, one in value.items()]
    if name in MAPPINGS:
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool):
        # YAML parses `off` as false.
        return value if name != "tracking" or value else "off"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _to_text(value: Any, domain: bool) -> str:
    """Format a value as it follows `=` on the command line. domain: lists are alternatives, mappings distributions."""
    if domain and isinstance(value, Mapping):
        return ",".join(f"{kind}({', '.join(map(json.dumps, numbers))})" for kind, numbers in value.items())
    if domain and isinstance(value, list):
        return ",".join(map(json.dumps, value))
    return format_value(value)
