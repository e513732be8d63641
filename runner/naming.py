"""What people call a run: its method, data, classes and seed, and where it differs from the run that was published."""

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
"""Of the embedded CLIP and the paper's, as suites run them: of the two nothing is said."""
MOST_LETTERS = 40
"""Of one value."""

Fields = dict[str, Any]


def run_name(config: RunConfig) -> str:
    """`coop · digits · base · seed 1`, followed by what is not as published: ` · lr 0.1, depth 3`."""
    parts = [config.method, config.dataset, config.classes, f"seed {config.seed}"]
    changed = [f"{field.rpartition('.')[2]} {_spoken(value)}" for field, value in changes(config).items()]
    return " · ".join([*parts, ", ".join(changed)] if changed else parts)


def changes(config: RunConfig) -> Fields:
    """The fields of a run that nobody gets by naming its method, data, classes and seed alone.

    Recipe and options are compared with all that were published for the method or are ProCAP's on such classes, since a
    run does not know its task: those count from which it differs least. A method that is not installed has no changes.
    """
    counted = config.identity()
    mine = _flat(counted["recipe"] or {"epochs": 0}, counted["options"])
    try:
        published = list(_published(config))
    except UsageError:
        return {}
    # What only one of the two has is of another version, and nobody changed it.
    differing: list[Fields] = [
        {**said, **{name: mine[name] for name in one if name in mine and mine[name] != one[name]}}
        for said, one in published
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
    """Recipe and options of the method under its own recipe and, where that is said, under ProCAP's."""
    from procap.methods import method_class, method_options
    from procap.methods.method import TASKS
    from shards.resolve import base_name

    own, control, base = method_class(config.method), method_class("procap"), base_name(config.dataset)
    for task in [task for task in TASKS if (task == "base-to-novel") != (config.classes == "all")]:
        given = own.task_options(task, config.shots, base)
        for said, kind, options in (({}, own, given), ({"recipe": "procap"}, control, {})):
            recipe = kind.recipe(task, config.shots, base).model_dump(mode="json")
            yield said, _flat(recipe, method_options(config.method, options).model_dump(mode="json"))


def _flat(recipe: Fields, options: Fields) -> Fields:
    """With names of their own, as sweeps have them: a method may call an option what a recipe calls a field."""
    groups = {"recipe": recipe, "options": options}
    return {f"{group}.{name}": value for group, fields in groups.items() for name, value in fields.items()}


def _default(field: str) -> Any:
    return RunConfig.model_fields[field].default


def _spoken(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    return textwrap.shorten(Path(value).name if Path(value).is_absolute() else value, MOST_LETTERS) or '""'
