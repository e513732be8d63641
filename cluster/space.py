"""Parse search spaces: the fields of a run that a sweep varies, read from text and converted to Ray Tune's domains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from procap.errors import UsageError, unknown_name
from procap.recipe import Recipe

Values = dict[str, Any]
"""A value for every field that is varied."""
Domain = list[Any] | dict[str, list[float]]
"""A list of values, or Ray Tune's name of a distribution with its arguments: {"loguniform": [1e-5, 1e-2]}."""

DISTRIBUTIONS: Mapping[str, tuple[str, Callable[..., bool]]] = {
    "uniform": ("low, high) with low < high", lambda low, high: low < high),
    "loguniform": ("low, high) with 0 < low < high", lambda low, high: 0 < low < high),
    "randint": ("low, high) with whole low < high", lambda low, high: low < high and low % 1 == high % 1 == 0),
}
"""The arguments of each distribution. The upper bound of `randint` is exclusive, as in Ray Tune."""
RUN_FIELDS = ("shots", "backbone", "pretrained", "precision", "recipe")
DIGITS = 4
"""Significant digits of drawn numbers, so that people can read and repeat them."""


def parse_param(text: str, methods: Sequence[str]) -> tuple[str, Domain]:
    """Parse `lr=loguniform(1e-5,1e-2)` or `n_ctx=2,4,8` into a field, as `resolve_field` names it, and its domain."""
    name, equals, values_text = text.partition("=")
    if not equals or not name.strip() or not values_text.strip():
        raise UsageError(f"--param {text}: write it as --param lr=loguniform(1e-5,1e-2) or --param n_ctx=2,4,8")
    counts = [(values_text.count(opening), values_text.count(closing)) for opening, closing in ("()", "[]")]
    if '"' not in values_text and any(opened != closed for opened, closed in counts):
        raise UsageError(f"--param {text}: a bracket is missing")
    field = resolve_field(name, methods)
    call = re.fullmatch(r"\s*([a-z_]+)\s*\((.*)\)\s*", values_text, re.DOTALL)
    values = _parse_values(field, call[2] if call else values_text)
    if call is None:
        # 1 and 1.0 are one value.
        return field, [value for number, value in enumerate(values) if value not in values[:number]]
    if call[1] not in DISTRIBUTIONS:
        raise unknown_name("distribution", call[1], list(DISTRIBUTIONS))
    distribution, (rule, is_valid) = call[1], DISTRIBUTIONS[call[1]]
    # By `type`, as `True` is an instance of int.
    numbers = [number for number in values if type(number) in (int, float) and math.isfinite(number)]
    if len(numbers) != len(values) or len(numbers) != 2 or not is_valid(*numbers):
        raise UsageError(f"{field}: {distribution}({', '.join(map(str, values))}) is not {distribution}({rule}")
    return field, {distribution: [int(number) if distribution == "randint" else float(number) for number in numbers]}


def resolve_field(name: str, methods: Sequence[str]) -> str:
    """Return the full name of a field: `recipe.lr` for `lr`, `options.n_ctx` for `n_ctx`, `shots`.

    Raises UsageError with the nearest names for an unknown field, or one that not each of `methods` has.
    """
    from procap.methods import method_class

    name = name.strip()
    first, *others = [method_class(method).Options.model_fields for method in methods]
    common = [option for option in first if all(option in options for options in others)]
    recipe_fields = [f"recipe.{field}" for field in Recipe.model_fields]
    fields = [*RUN_FIELDS, *recipe_fields, *(f"options.{option}" for option in common)]
    matching = [name] if name in fields else [field for field in fields if field.partition(".")[2] == name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"'{name}' is a field of the recipe and of the method: use {' or '.join(matching)}")
    raise unknown_name("field", name, [field.rpartition(".")[2] for field in fields])


def to_tune(domain: Domain, *, grid: bool = False) -> Any:
    """Convert to Ray Tune's domain; lists become `choice`, or `grid_search` for a grid."""
    from ray import tune

    if isinstance(domain, list):
        return tune.grid_search(domain) if grid else tune.choice(domain)
    ((distribution, arguments),) = domain.items()
    return getattr(tune, distribution)(*arguments)


def value_between(domain: dict[str, list[float]]) -> Any:
    """Return a value of a distribution between its bounds."""
    ((distribution, (low, high)),) = domain.items()
    return int(low + high) // 2 if distribution == "randint" else (low + high) / 2


def round_value(domain: Domain, value: Any) -> Any:
    """Round a drawn number to `DIGITS` significant digits inside its bounds; other values only become plain Python."""
    # Tune's samplers return numpy scalars.
    value = value.item() if hasattr(value, "item") else value
    if isinstance(domain, list) or not isinstance(value, float):
        return value
    ((low, high),) = domain.values()
    # Optuna refuses a point outside the bounds when a sweep continues with its earlier results.
    return min(max(float(f"{value:.{DIGITS}g}"), low), high)


def _parse_values(field: str, text: str) -> list[Any]:
    """Parse values between commas: all of them JSON, or numbers and words without quotes and brackets."""
    # NaN and Infinity, which Python's json reads as numbers, stay words here: as bounds they are refused.
    with suppress(json.JSONDecodeError):
        values: list[Any] = json.loads(f"[{text}]", parse_constant=str)
        return values
    if re.search(r'["\[{]', text):
        raise UsageError(f"{field}: {text} is not a list of JSON values: quote its words")
    values = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            values.append(json.loads(word, parse_constant=str))
        except json.JSONDecodeError:
            values.append(word)
    return values
