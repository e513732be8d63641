"""Read the flags of a command from a YAML file, and write them to one: `--config` and `--save-config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from benchmarks.cli.flags import flag, given_values
from benchmarks.console.output import is_first_rank, note
from procap.errors import UsageError, check_names
from runner.results import write_bytes
from shards.credentials import mask_urls
from shards.files import read_regular
from shards.yaml_files import parse_yaml


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of a YAML file the defaults of a command's flags. Raises UsageError for an unknown key."""
    if file:
        context.default_map = parse_config(file.expanduser(), context.command.params)
    return file


def parse_config(file: Path, parameters: list[Any]) -> dict[str, Any]:
    """Return the values of a YAML file by the parameters of a command."""
    import yaml

    try:
        # Values stay texts, as on the command line: YAML would read `off` as false.
        keys = parse_yaml(read_regular(file).decode(), yaml.BaseLoader) or {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is no YAML that can be read ({' '.join(str(error).split())[:300]})") from None
    if not isinstance(keys, dict):
        raise UsageError(f"{file} has no keys: write lines such as `methods: maple,procap`")
    flags = {name.lstrip("-"): parameter for parameter in parameters for name in parameter.opts if name[:2] == "--"}
    check_names(f"key of {file}", keys, flags.keys() - {"config", "save-config", "help"})
    values: dict[str, Any] = {}
    for key, value in keys.items():
        parameter = flags[key]
        # Values inside these would be written out, and anchors of YAML repeat them without end.
        inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in inner):
            raise UsageError(f"{file}: {key}: give a text, a list of texts, or a mapping of names to texts")
        if parameter.name in values:
            raise UsageError(f"{file}: {key} stands twice, also as {parameter.opts[0].lstrip('-')}")
        items = [f"{name}={text}" for name, text in value.items()] if isinstance(value, dict) else value
        if parameter.multiple:
            values[parameter.name] = items if isinstance(items, list) else [items]
        else:
            values[parameter.name] = ",".join(items) if isinstance(items, list) else items
    return values


@dataclass(frozen=True)
class ConfigFlags:
    """Flags that read and write a YAML file of flags."""

    heading: ClassVar[str] = "Configuration"
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            is_eager=True,
            callback=read_config,
            help="read flags from a YAML file; those typed here win",
        ),
    ] = None
    save_config: Annotated[Path | None, flag("FILE.yaml", "write the flags to a file for --config")] = None

    def save(self, *groups: object, **others: str) -> None:
        """Write the flags of `groups` that are not the default, and other flags, if --save-config names a file.

        Without the users and passwords of URLs. Raises UsageError for an existing file with different content.
        """
        import yaml

        if (file := self.save_config) and is_first_rank():
            values = given_values(*groups) | {name: value for name, value in others.items() if value}
            text = mask_urls(yaml.safe_dump(values, sort_keys=False))
            if file.is_file() and file.read_bytes() != text.encode():
                raise UsageError(f"--save-config {file}: the file has different content; delete it or name another one")
            write_bytes(file, text.encode())
            note(f"flags written to {file}")
