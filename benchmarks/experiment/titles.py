"""Name methods and their variants as tables and plots print them, and order them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from procap.methods import METHODS, title_and_colour
from procap.recipe import format_value
from runner.config import RunConfig


def title_method(name: str) -> str:
    """Return the title of a method in tables and plots."""
    return title_and_colour(name)[0]


def choose_reference(methods: Iterable[str], chosen: str = "") -> str:
    """Return the method that the others are compared with: `chosen`, the only plug-in, ProCAP, or else the last."""
    compared = list(dict.fromkeys(methods))
    plug_ins = [method for method in compared if method not in METHODS]
    preferred = (chosen, plug_ins[0] if len(plug_ins) == 1 else "", "procap")
    return next((method for method in preferred if method in compared), compared[-1])


def order_in(name: str, names: Iterable[str]) -> tuple[int, str]:
    """Sort key: the order of `names`, then others alphabetically."""
    order = list(names)
    return (order.index(name) if name in order else len(order), name)


def sort_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Sort methods as `procap ls methods` does."""
    return tuple(sorted(names, key=lambda name: order_in(name, METHODS)))


def describe_settings(config: RunConfig) -> dict[str, str]:
    """Collect settings that distinguish a run; a dotted name is a field of the recipe or an option of the method."""
    settings = {
        "backbone": config.backbone,
        "pretrained": config.pretrained or "default",
        "precision": config.precision,
        "classes": config.classes,
    }
    settings |= {f"{config.method}.{name}": format_value(value) for name, value in sorted(config.options.items())}
    if config.recipe.epochs:
        settings |= {"shots": str(config.shots or "full"), "sampling": config.sampling, "recipe": config.recipe_name}
        # The method of the run that the training started from.
        settings["init"] = RunConfig.parse_path(config.init)["method"] if config.init else "none"
        fields = config.identity()["recipe"]
        settings |= {f"recipe.{name}": format_value(getattr(config.recipe, name)) for name in sorted(fields)}
    return settings


def find_differences(rows: Iterable[Mapping[str, str]]) -> dict[str, Counter[str]]:
    """Count the values of each setting that differs between rows; those without a value are left out."""
    counts: dict[str, Counter[str]] = {}
    for name, value in (item for settings in rows for item in settings.items()):
        counts.setdefault(name, Counter())[value] += 1
    return {name: values for name, values in counts.items() if len(values) > 1}


SHARED = ("backbone", "pretrained", "precision", "shots", "sampling")
"""Settings that are compared between all rows; others are compared between the rows of one method."""


WITHIN = ("code", "start", "limit", "recipe.colour_jitter", "recipe.rotation")
"""Settings that are, as files, compared within a data set alone; published recipes set the last two by data set."""


def title_variants(frame: Any) -> list[str]:
    """Make a title for each row: the method's, and the values of settings that vary, as `MaPLe, lr 0.01`.

    The classes trained on are no part of it. A recipe is one value if all rows of its method have a recipe with a
    name, else its fields are. What more than half of the rows of a method have is not named, unless it is SHARED or an
    evaluation that is not the default.
    Rows that would have one title on a data set, and differ in anything but the seed, are named by that as well.
    frame: anything with the columns `method`, `dataset`, `target`, `path` and `settings`.
    """
    rows = list(zip(frame.method, frame.settings, strict=True))
    counts: dict[tuple[str, str], Counter[str]] = {}
    for method, settings in rows:
        for name, value in settings.items():
            counts.setdefault(("" if name in SHARED else method, name), Counter())[value] += 1

    def is_named(method: str, name: str, value: str) -> bool:
        if name in SHARED:
            return len(counts["", name]) > 1
        has_names = "custom" not in counts.get((method, "recipe"), ())
        of_recipe = name.startswith("recipe") and (name == "recipe") != has_names
        if name == "classes" or of_recipe or name in WITHIN or name.startswith("file."):
            return False
        values = counts[method, name]
        if name == "evaluation" and value != "default":
            return len(values) > 1
        return 2 * values[value] <= values.total()

    titles = []
    for method, settings in rows:
        named = [(name.rpartition(".")[2], value) for name, value in settings.items() if is_named(method, name, value)]
        titles.append(", ".join([title_method(method), *(" ".join(item) for item in named)]))
    groups: dict[tuple[str, ...], list[tuple[str, Mapping[str, str]]]] = {}
    for *key, path, settings in zip(titles, frame.dataset, frame.target, frame.path, frame.settings, strict=True):
        # A whole result has no limit.
        groups.setdefault((*key, settings["classes"]), []).append((path, {"limit": "none", **settings}))
    further: dict[tuple[str, str, str], dict[str, None]] = {}
    for (title, _, target, _), runs in groups.items():
        for name, values in find_differences(settings for _, settings in runs).items():
            for path, settings in runs:
                if name in settings and 2 * values[settings[name]] <= values.total():
                    words = f"{name.rpartition('.')[2]} {settings[name]}"
                    # Results of a run can have different limits, but share all else.
                    further.setdefault((title, path, target if name == "limit" else ""), {})[words] = None
    keys = zip(titles, frame.path, frame.target, strict=True)
    return [
        ", ".join([title, *further.get((title, path, ""), {}), *further.get((title, path, target), {})])
        for title, path, target in keys
    ]


def variant_order(method: str, settings: Mapping[str, str]) -> tuple[Any, ...]:
    """Sort key of a row: its method, then its settings, with numbers in their order and texts last."""

    def rank(value: str) -> tuple[float, str]:
        try:
            return float(value), ""
        except ValueError:
            return math.inf, value

    ranks = [(name, rank(value)) for name, value in settings.items() if name != "classes"]
    return *order_in(method, METHODS), ranks
