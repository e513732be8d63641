"""What is asked of a sweep: flags, and a YAML file that has the same names as keys."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from benchmarks.cli.flags import EngineFlags, LaunchFlags, RecipeFlags, RuntimeFlags, SelectionFlags, SweepFlags
from procap.errors import UsageError, unknown_name
from runner.collection import COLLECTION_NAME

Group = TypeVar("Group", SweepFlags, SelectionFlags, RecipeFlags, LaunchFlags, RuntimeFlags, EngineFlags)
FIELDS_OF_RUNS = ("option", "recipe_field")
"""Given as a mapping in a file, as key=value on the command line."""


@dataclass(frozen=True)
class Asked:
    """The flags of `procap sweep`. space: what a file says to vary, beside `searched.vary`."""

    searched: SweepFlags
    selection: SelectionFlags
    training: RecipeFlags
    many: LaunchFlags
    place: RuntimeFlags
    parallel: EngineFlags
    space: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Asked:
        """From the command's parameters by name."""

        def group(kind: type[Group]) -> Group:
            return kind(**{one.name: params[one.name] for one in fields(kind)})

        return cls(
            group(SweepFlags),
            group(SelectionFlags),
            group(RecipeFlags),
            group(LaunchFlags),
            group(RuntimeFlags),
            group(EngineFlags),
        )

    @property
    def groups(self) -> tuple[SweepFlags, SelectionFlags, RecipeFlags, LaunchFlags, RuntimeFlags, EngineFlags]:
        return self.searched, self.selection, self.training, self.many, self.place, self.parallel


def with_file(asked: Asked, file: Path | None, typed: Collection[str] = ()) -> Asked:
    """`asked` with what `file` says where no flag was given; the sweep has the file's name if it has none.

    typed: names of the flags that were given, be it with their defaults.
    Raises UsageError for a file that is not there or not YAML, for keys that are no flags, and values of a wrong type.
    """
    if file is None:
        return asked
    said = _said(file)
    if "name" not in said and "name" not in typed:
        if not re.fullmatch(COLLECTION_NAME, file.stem):
            raise UsageError(f"'{file.stem}' cannot name a sweep, which starts with a letter or digit: add --name")
        said["name"] = file.stem
    space = said.pop("vary", None)
    if space is not None and not isinstance(space, Mapping):
        raise UsageError(f"{file}: vary: name the fields below it, as in lr: {{log: [1e-5, 1e-2]}}")
    groups = {part.name: getattr(asked, part.name) for part in fields(asked) if part.name != "space"}
    owners = {part.name: name for name, group in groups.items() for part in fields(group)}
    for key, value in said.items():
        if key not in owners:
            raise UsageError(f"{file}: {unknown_name('key', key, {*owners, 'vary'})}")
        if key not in typed:
            group = groups[owners[key]]
            flag = get_type_hints(type(group), include_extras=True)[key]
            groups[owners[key]] = replace(group, **{key: _typed(file, key, value, flag)})
    return Asked(**groups, space=space)


def _said(file: Path) -> dict[str, Any]:
    """What the file says, by the names of flags; a key without a value says nothing."""
    said: dict[str, Any] = {}
    for key, value in read_yaml(file).items():
        name = str(key).replace("-", "_")
        if name in said:
            raise UsageError(f"{file}: {key} is there twice")
        said[name] = value
    return {name: value for name, value in said.items() if value is not None}


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """A mapping as YAML 1.2 reads it: 1e-5 and 010 are numbers, on, off, yes, no, 1:30 and dates are words.

    Raises UsageError for a file that cannot be read, is no YAML, or has a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader with other words for true, false and numbers."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    other = (":bool", ":float", ":int", ":timestamp")
    Loader.yaml_implicit_resolvers = {
        mark: [(tag, pattern) for tag, pattern in known if not tag.endswith(other)]
        for mark, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
    for kind, pattern, marks in (
        ("bool", r"(?i:^(?:true|false)$)", "tTfF"),
        ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
        ("float", number, "-+.0123456789"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(marks))
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: _whole(node.value))
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{file} is no YAML{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, Mapping):
        raise UsageError(f"{file}: keys and values are needed, as in `methods: procap`")
    return found


def _whole(text: str) -> int:
    """A whole number; one that begins with a zero is a decimal one as well."""
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _typed(file: Path, key: str, value: Any, flag: Any) -> Any:
    """`value` as the flag of that name has it. flag: its annotation, with the type and what typer is told."""
    hint, option = get_args(flag)
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
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:
            raise UsageError(f"{file}: {key}: a {'whole ' if whole else ''}number is needed, not {value!r}")
        if option.min is not None and value < option.min:
            raise UsageError(f"{file}: {key}: at least {option.min} is needed, not {value!r}")
        if option.max is not None and value > option.max:
            raise UsageError(f"{file}: {key}: at most {option.max} is possible, not {value!r}")
        return value if whole else float(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        raise UsageError(f"{file}: {key}: a name or a list of names is needed")
    return Path(str(value)) if "Path" in wanted else str(value)
