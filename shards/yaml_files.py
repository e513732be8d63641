"""Parse YAML whose keys stand once in each mapping."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode


def parse_yaml(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """Parse a YAML document. Raises yaml.YAMLError naming a key that stands twice, of which PyYAML keeps the last."""

    class UniqueKeyLoader(loader):
        def construct_mapping(self, node: MappingNode, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, ScalarNode):
                    # A list or a mapping, which PyYAML refuses in the line that it stands in.
                    continue
                if key.value in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key '{key.value}' stands twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    return yaml.load(text, UniqueKeyLoader)
