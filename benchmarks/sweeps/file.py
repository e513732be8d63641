"""Read the YAML file of a sweep: its keys are the flags of the command line, without dashes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.console.errors import COMMAND_LINE_ERROR, one_line
from benchmarks.console.parse import check_arguments
from procap.errors import UsageError
from runner.run_collection import COLLECTION_NAME

MAPPINGS = ("param", "option", "recipe_field")
"""Keys with a mapping of fields to values; each item corresponds to one flag."""


def merge_file(context: Any, file: Path, typed: set[str]) -> dict[str, Any]:
    """Merge the values of `file` into parameters without a typed flag; `param` is merged by field.

    context: typer's. Raises UsageError for a file that is not there or not YAML, unknown keys and wrong values.
    """
    words = _to_flags(read_yaml(file))
    check_arguments(words, {})
    try:
        read = context.command.make_context(context.info_name, words).params
    except COMMAND_LINE_ERROR as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(f"{file}: {one_line(message)}") from error
    params = {name: context.params[name] if name in typed else value for name, value in read.items()}
    if "param" in typed:
        fields = {text.partition("=")[0].strip() for text in context.params["param"]}
        filed = [text for text in read["param"] or [] if text.partition("=")[0].strip() not in fields]
        params["param"] = [*filed, *context.params["param"]]
    if not params["name"]:
        if not re.fullmatch(COLLECTION_NAME, file.stem):
            raise UsageError(f"'{file.stem}' cannot name a sweep, which starts with a letter or digit: add --name")
        params["name"] = file.stem
    return params


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """Read a mapping. Raises UsageError for a file that cannot be read, is no YAML, or has a key twice."""
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
        raise UsageError(f"{file} is no YAML{where}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no YAML: {one_line(str(error))}") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{file}: keys and values are needed, as in `methods: procap`")
    return found


def _to_flags(document: Mapping[Any, Any]) -> list[str]:
    words = []
    for key, value in document.items():
        name, flag = str(key).replace("-", "_"), f"--{str(key).replace('_', '-')}"
        if name in MAPPINGS and isinstance(value, Mapping):
            for field, one in value.items():
                words += [flag, f"{field}={_to_text(one, name == 'param')}"]
        elif value is True:
            words.append(flag)
        elif value is False and name == "tracking":
            # YAML parses `off` as false.
            words += [flag, "off"]
        elif isinstance(value, list):
            words += [flag, ",".join(map(str, value))]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def _to_text(value: Any, domain: bool) -> str:
    """Format a value as it follows `=` on the command line. domain: lists are alternatives, mappings distributions."""
    if domain and isinstance(value, Mapping):
        return ",".join(f"{kind}({', '.join(map(json.dumps, numbers))})" for kind, numbers in value.items())
    if domain and isinstance(value, list):
        return ",".join(map(json.dumps, value))
    return value if isinstance(value, str) else json.dumps(value)
