"""Format readable names of runs: method, data, classes, seed, and the differences from the published run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from procap.errors import UsageError
from runner.config import RunConfig

RUN_FIELDS = ("shots", "pretrained", "picks")
PRECISIONS = {"mini": "fp32", "ViT-B-16": "bf16"}
"""Backbones and precisions that suites use, which a name leaves out."""
MAX_VALUE_LENGTH = 40

Fields = dict[str, Any]


def run_name(config: RunConfig) -> str:
    """Format `coop · digits · base · seed 1` and the differences from the published run: ` · lr 0.1, depth 3`."""
    parts = [config.method, config.dataset, config.classes, f"seed {config.seed}"]
    changed = [f"{field.rpartition('.')[2]} {_format_value(value)}" for field, value in find_changes(config).items()]
    return " · ".join([*parts, ", ".join(changed)] if changed else parts)


def find_changes(config: RunConfig) -> Fields:
    """List the fields of a run that its method, data, classes and seed do not imply.

    A run does not store its task, so recipe and options are compared with those of every task, published for the method
    and ProCAP's own; the comparison with the fewest differences counts. A method that is not installed has no changes.
    """
    counted = config.identity()
    mine = _flat(counted["recipe"] or {"epochs": 0}, counted["options"])
    try:
        published = list(_published(config))
    except UsageError:
        return {}
    # A field that only one of the two has belongs to another version of the method.
    differing: list[Fields] = [
        {**label, **{name: mine[name] for name in values if name in mine and mine[name] != values[name]}}
        for label, values in published
    ]
    nearest = min(differing, key=len)
    rest = {name: counted[name] for name in RUN_FIELDS if counted.get(name, "") != _default(name)}
    full = {"shots": "full"} if config.shots == 0 else {}
    return {**nearest, **rest, **full, **_model(config)}


def _model(config: RunConfig) -> Fields:
    backbone = {} if config.backbone in PRECISIONS else {"backbone": config.backbone}
    usual = PRECISIONS.get(config.backbone, _default("precision"))
    return backbone if config.precision == usual else {**backbone, "precision": config.precision}


def _published(config: RunConfig) -> Iterator[tuple[Fields, Fields]]:
    """Return published recipe and options, under the method's recipe and under ProCAP's, each with a label."""
    from procap.methods import method_class, method_options
    from procap.methods.method import TASKS
    from shards.resolve import base_name

    own, control, base = method_class(config.method), method_class("procap"), base_name(config.dataset)
    for task in [task for task in TASKS if (task == "base-to-novel") != (config.classes == "all")]:
        given = own.task_options(task, config.shots, base)
        for label, kind, options in (({}, own, given), ({"recipe": "procap"}, control, {})):
            recipe = kind.recipe(task, config.shots, base).model_dump(mode="json")
            yield label, _flat(recipe, method_options(config.method, options).model_dump(mode="json"))


def _flat(recipe: Fields, options: Fields) -> Fields:
    """Flatten to one dictionary with prefixes, because an option can have the name of a recipe's field."""
    groups = {"recipe": recipe, "options": options}
    return {f"{group}.{name}": value for group, fields in groups.items() for name, value in fields.items()}


def _default(field: str) -> Any:
    return RunConfig.model_fields[field].default


def _format_value(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    return textwrap.shorten(Path(value).name if Path(value).is_absolute() else value, MAX_VALUE_LENGTH) or '""'
