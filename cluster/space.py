"""Parse search spaces: the fields of a run that a sweep varies, read from text and converted to Ray Tune's domains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from procap.errors import UsageError, unknown_name
from procap.recipe import Recipe
from runner.config import RunConfig

Values = dict[str, Any]
"""A value for every field that is varied."""
Domain = list[Any] | dict[str, list[float]]
"""A list of values, or Ray Tune's name of a distribution with its arguments: {"loguniform": [1e-5, 1e-2]}."""

DISTRIBUTIONS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2}
"""With the number of arguments. The upper bound of `randint` is exclusive, as in Ray Tune."""
RUN_FIELDS = ("method", "dataset", "shots", "backbone", "pretrained", "precision", "recipe")
REFUSED = {
    "seed": "every configuration is averaged over all of --seeds",
    "classes": "the metric decides which classes are trained on, see --metric and --classes",
    "few_shot_samples": "the samples are the same for the whole sweep, see --few-shot-samples",
}
DIGITS = 4
"""Significant digits of drawn numbers, so that people can read and repeat them."""


def parse_param(text: str, methods: Sequence[str]) -> tuple[str, Domain]:
    """Parse `lr=loguniform(1e-5,1e-2)` or `n_ctx=2,4,8` into a field, as `resolve_field` names it, and its domain."""
    name, equals, given = text.partition("=")
    if not equals or not name.strip() or not given.strip():
        raise UsageError(f"--param {text}: write it as --param lr=loguniform(1e-5,1e-2) or --param n_ctx=2,4,8")
    field = resolve_field(name, methods)
    call = re.fullmatch(r"\s*([a-z_]+)\s*\((.*)\)\s*", given, re.DOTALL)
    if call:
        return field, _parse_distribution(field, call[1], [_parse_value(part) for part in _split(call[2])])
    values = _read_values(field, [_parse_value(part) for part in _split(given)], methods)
    if not all(map(_is_finite, values)):
        raise UsageError(f"{field}: every number must be finite")
    return field, list({json.dumps(value): value for value in values}.values())


def resolve_field(name: str, methods: Sequence[str]) -> str:
    """Return the full name of a field: `recipe.lr` for `lr`, `options.n_ctx` for `n_ctx`, `dataset`.

    Raises UsageError with the nearest names for an unknown field, or one that not each of `methods` has.
    """
    from procap.methods import method_class

    name = name.strip()
    if (refused := name.replace("-", "_").removesuffix("s") if name == "seeds" else name) in REFUSED:
        raise UsageError(f"'{name}' cannot be varied: {REFUSED[refused]}")
    recipe = list(Recipe.model_fields)
    options = {method: list(method_class(method).Options.model_fields) for method in methods}
    everywhere = [field for field in next(iter(options.values())) if all(field in known for known in options.values())]
    owner, dot, field = name.partition(".")
    groups: Mapping[str, Sequence[str]] = {"recipe": recipe, "options": everywhere}
    if dot and owner in groups and field in groups[owner]:
        return name
    if not dot:
        if name in RUN_FIELDS:
            return name
        found = [group for group, fields in groups.items() if name in fields]
        if len(found) == 1:
            return f"{found[0]}.{name}"
        if found:
            raise UsageError(
                f"'{name}' is a field of the recipe and of the method: say recipe.{name} or options.{name}"
            )
    plain = field if owner == "options" else name
    lacking = [method for method, known in options.items() if plain not in known]
    if 0 < len(lacking) < len(options):
        raise UsageError(f"'{name}' is no option of {', '.join(lacking)}: sweep over methods that all have it")
    raise unknown_name("field", name, [*RUN_FIELDS, *recipe, *everywhere])


def to_tune(domain: Domain, *, grid: bool = False) -> Any:
    """Convert to Ray Tune's domain; lists become `choice`, or `grid_search` for a grid."""
    from ray import tune

    if isinstance(domain, list):
        return tune.grid_search(domain) if grid else tune.choice(domain)
    ((kind, arguments),) = domain.items()
    return getattr(tune, kind)(*arguments)


def round_value(domain: Domain, value: Any) -> Any:
    """Round a drawn number to `DIGITS` significant digits inside its bounds; other values are unchanged."""
    if isinstance(domain, list) or not isinstance(value, float) or "quniform" in domain:
        return value
    ((low, high),) = domain.values()
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)


def _parse_distribution(field: str, kind: str, arguments: Sequence[Any]) -> Domain:
    if kind not in DISTRIBUTIONS:
        raise unknown_name("distribution", kind, list(DISTRIBUTIONS))
    shown = f"{field}: {kind}({', '.join(map(str, arguments))})"
    for number in arguments:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UsageError(f"{shown}: {number!r} is not a number")
    if len(arguments) != DISTRIBUTIONS[kind] or not arguments[0] < arguments[1]:
        needed = "low, high and step" if kind == "quniform" else "two numbers"
        raise UsageError(f"{shown}: {needed} are needed, the lower bound first")
    if kind == "loguniform" and arguments[0] <= 0:
        raise UsageError(f"{shown}: a logarithm needs numbers above 0")
    if kind == "quniform" and not 0 < arguments[2] <= arguments[1] - arguments[0]:
        raise UsageError(f"{shown}: the step has to be above 0 and fit between the bounds")
    if kind == "randint" and any(number != int(number) for number in arguments):
        raise UsageError(f"{shown}: whole numbers are needed, or uniform({arguments[0]}, {arguments[1]})")
    return {kind: [int(number) if kind == "randint" else float(number) for number in arguments]}


def _read_values(field: str, given: Sequence[Any], methods: Sequence[str]) -> list[Any]:
    """Parse `given` as a run does, so that 1 and 1.0 of a float are one value; the run rejects invalid ones."""
    from procap.methods import method_class

    group, dot, name = field.rpartition(".")
    owner = method_class(methods[0]).Options if group == "options" else Recipe if dot else RunConfig
    if name not in owner.model_fields:
        return list(given)
    annotation: Any = owner.model_fields[name].annotation
    kind = TypeAdapter(annotation)
    values = []
    for value in given:
        try:
            values.append(kind.dump_python(kind.validate_python(value), mode="json"))
        except ValidationError:
            values.append(value)
    return values


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quoted = [""], 0, False
    for mark in text:
        quoted ^= mark == '"'
        depth += 0 if quoted else (mark in "[(") - (mark in "])")
        if mark == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += mark
    return [part.strip() for part in parts if part.strip()]


def _parse_value(text: str) -> Any:
    """Parse JSON, or return the text itself if it is not JSON."""
    try:
        return json.loads(text, parse_constant=str)
    except json.JSONDecodeError:
        return text
