"""What is asked of a sweep: flags, and a YAML file that has the same names as keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.flags import Many, Parallel, Place, Searched, Selection, Training
from procap.errors import UsageError, UserError, unknown_name

FIELDS_OF_RUNS = ("option", "recipe_field")
"""Given as a mapping in a file, as key=value on the command line."""


@dataclass(frozen=True)
class Asked:
    """The flags of `procap sweep`. space: what a file says to vary, beside `searched.vary`."""

    searched: Searched
    selection: Selection
    training: Training
    many: Many
    place: Place
    parallel: Parallel
    space: Mapping[str, Any] | None = None


def with_file(asked: Asked, file: Path | None) -> Asked:
    """`asked` with what `file` says where no flag was given; the sweep has the file's name if it has none.

    Raises UsageError for a file that is not there or not YAML, for keys that are no flags, and values of a wrong type.
    """
    if file is None:
        return asked
    said = {str(key).replace("-", "_"): value for key, value in read_yaml(file).items()}
    said.setdefault("name", file.stem)
    space = said.pop("vary", None)
    if space is not None and not isinstance(space, Mapping):
        raise UsageError(f"{file}: vary: name the fields below it, as in lr: {{log: [1e-5, 1e-2]}}")
    groups = {part.name: getattr(asked, part.name) for part in fields(asked) if part.name != "space"}
    owners = {part.name: name for name, group in groups.items() for part in fields(group)}
    for key, value in said.items():
        if key not in owners:
            raise UsageError(f"{file}: {unknown_name('key', key, {*owners, 'vary'})}")
        name = owners[key]
        group = groups[name]
        default = next(part.default for part in fields(group) if part.name == key)
        if value is not None and getattr(group, key) == default:
            groups[name] = replace(group, **{key: _typed(file, key, value, get_type_hints(type(group))[key])})
    return Asked(**groups, space=space)


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """A mapping as YAML 1.2 reads it: 1e-5 is a number, and on, off, yes and no are words."""
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader with other words for true, false and numbers."""

    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    Loader.yaml_implicit_resolvers = {
        mark: [(tag, pattern) for tag, pattern in known if not tag.endswith((":bool", ":float"))]
        for mark, known in resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$", re.IGNORECASE), list("tTfF"))
    number = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{file}: keys and values are needed, as in `methods: procap`")
    return found


def _typed(file: Path, key: str, value: Any, hint: Any) -> Any:
    """`value` as the flag of that name has it."""
    wanted = str(hint)
    if key in FIELDS_OF_RUNS:
        if not isinstance(value, Mapping):
            raise UsageError(f"{file}: {key}: name the fields below it, as in n_ctx: 4")
        return [f"{name}={json.dumps(one)}" for name, one in value.items()]
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise UsageError(f"{file}: {key}: true or false is needed, not {value!r}")
    if "int" in wanted or "float" in wanted:
        whole = "float" not in wanted
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UsageError(f"{file}: {key}: a {'whole ' if whole else ''}number is needed, not {value!r}")
        return value if whole else float(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        raise UsageError(f"{file}: {key}: a name or a list of names is needed")
    return Path(str(value)) if "Path" in wanted else str(value)
