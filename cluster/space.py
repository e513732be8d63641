"""What a sweep varies: fields of a run with the values they may take, and how configurations are drawn from them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from procap.errors import UsageError, unknown_name
from procap.recipe import Recipe
from runner.config import RunConfig
from shards.rng import generator

Kind = Literal["list", "uniform", "log", "integers"]
Values = dict[str, Any]
"""One configuration: a value for every field that is varied."""

KINDS = ("range", "uniform", "log", "integers")
RUN_FIELDS = ("method", "dataset", "shots", "backbone", "pretrained", "precision", "recipe")
REFUSED = {
    "seed": "seeds are never searched over, every configuration is averaged over all of --seeds",
    "classes": "the metric decides which classes are trained on, see --metric and --classes",
    "picks": "imported samples are one choice of images for the whole sweep, see --few-shot-samples",
}
MOST_LISTED = 100_000
"""Values of a range, and configurations of a grid."""
MOST_REPEATED = 50
"""Draws in a row, per configuration that is known, after which there are taken to be no others."""
DIGITS = 4
"""Significant digits of numbers that are drawn, so that people can read and repeat them."""


@dataclass(frozen=True)
class Dimension:
    """A field and what it may be: each of `values`, or a number from `low` to `high`, both included.

    field: as `resolve` gives it. kind: "log" is uniform in the logarithm.
    """

    field: str
    kind: Kind
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    def draw(self, seed: int, number: int) -> Any:
        """Its value in the configuration of that number, the same whenever it is asked for."""
        import torch

        part = torch.rand((), generator=generator(seed, "sweep", number, self.field), dtype=torch.float64).item()
        if self.kind == "list":
            return self.values[int(part * len(self.values))]
        if self.kind == "integers":
            return int(self.low) + int(part * (int(self.high) - int(self.low) + 1))
        if self.kind == "log":
            return self.rounded(math.exp(math.log(self.low) + part * (math.log(self.high) - math.log(self.low))))
        return self.rounded(self.low + part * (self.high - self.low))

    def rounded(self, value: float) -> float:
        """`value` with as many digits as are shown, inside the limits."""
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def plain(self) -> Any:
        """As a file says it, and `dimension` reads it."""
        if self.kind == "list":
            return list(self.values)
        numbers = (int(self.low), int(self.high)) if self.kind == "integers" else (self.low, self.high)
        return {self.kind: list(numbers)}


@dataclass(frozen=True)
class Space:
    """All dimensions; `size` is the number of configurations, None for endlessly many."""

    dimensions: tuple[Dimension, ...]

    @property
    def listed(self) -> bool:
        """Whether every dimension is a list."""
        return all(dimension.kind == "list" for dimension in self.dimensions)

    @property
    def size(self) -> int | None:
        sizes = []
        for dimension in self.dimensions:
            if dimension.kind == "integers":
                sizes.append(int(dimension.high) - int(dimension.low) + 1)
            elif dimension.kind == "list":
                sizes.append(len(dimension.values))
            elif dimension.low < dimension.high:
                return None
        return math.prod(sizes)

    def grid(self) -> Iterator[Values]:
        """Every configuration of lists, the last field varying fastest."""
        for chosen in itertools.product(*(dimension.values for dimension in self.dimensions)):
            yield {dimension.field: value for dimension, value in zip(self.dimensions, chosen, strict=True)}

    def draws(self, seed: int) -> Iterator[Values]:
        """Configurations at random, none twice; a function of `seed` alone, which ends when there is no other one."""
        seen: set[str] = set()
        repeated = 0
        for number in itertools.count():
            # A range that is narrower than the digits of what is drawn has few values, and nobody knows how many.
            if len(seen) == self.size or repeated > MOST_REPEATED * (1 + len(seen)):
                return
            values = {dimension.field: dimension.draw(seed, number) for dimension in self.dimensions}
            repeated += 1
            if (digest := digest_of(values)) not in seen:
                seen.add(digest)
                repeated = 0
                yield values

    def plain(self) -> dict[str, Any]:
        return {dimension.field: dimension.plain() for dimension in self.dimensions}


def digest_of(values: Mapping[str, Any]) -> str:
    """The name of a configuration: 12 hex digits over its values, whatever their order."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def resolve(name: str, methods: Sequence[str]) -> str:
    """The one spelling of a field: `dataset`, `recipe.lr`, `options.n_ctx`; `lr` and `n_ctx` mean the same.

    Raises UsageError with the nearest names for one that there is not, or not in each of `methods`.
    """
    from procap.methods import method_class

    name = name.strip()
    if name in REFUSED or name.rstrip("s") in REFUSED:
        raise UsageError(f"'{name}' cannot be varied: {REFUSED[name if name in REFUSED else name.rstrip('s')]}")
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


def dimension(field: str, given: Any, methods: Sequence[str]) -> Dimension:
    """A dimension as files say it: a list, one value, or `{log: [1e-5, 1e-2]}`.

    field: as `resolve` gives it. Raises UsageError for what is neither.
    """
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise UsageError(f"{field}: one of {', '.join(KINDS)} is needed, as in {{log: [1e-5, 1e-2]}}")
        ((kind, numbers),) = given.items()
        return _ranged(field, str(kind), numbers if isinstance(numbers, list | tuple) else [numbers], methods)
    return _listed(field, given if isinstance(given, list | tuple) else [given], methods)


def dimension_of_text(text: str, methods: Sequence[str]) -> Dimension:
    """A dimension as it is typed: `lr=log(1e-5,1e-2)`, `n_ctx=2,4,8`; see `dimension`."""
    name, equals, given = text.partition("=")
    if not equals or not name.strip() or not given.strip():
        raise UsageError(f"--vary {text}: write it as --vary lr=log(1e-5,1e-2) or --vary n_ctx=2,4,8")
    field = resolve(name, methods)
    call = re.fullmatch(r"\s*([a-z_]+)\s*\((.*)\)\s*", given, re.DOTALL)
    if call:
        return _ranged(field, call[1], [_value(part) for part in _parts(call[2])], methods)
    return _listed(field, [_value(part) for part in _parts(given)], methods)


def _listed(field: str, given: Sequence[Any], methods: Sequence[str]) -> Dimension:
    if not given:
        raise UsageError(f"{field}: at least one value is needed")
    if any(isinstance(value, Mapping) for value in given):
        raise UsageError(f"{field}: a value is a number, a text, true, false, null or a list of these")
    values = _as_read(field, given, methods)
    if not all(map(_finite, values)):
        raise UsageError(f"{field}: every number must be finite")
    return Dimension(field, "list", tuple({json.dumps(value): value for value in values}.values()))


def _as_read(field: str, given: Sequence[Any], methods: Sequence[str]) -> list[Any]:
    """`given` as a run reads them, so that 1 and 1.0 of a number are one value.

    What no run accepts stays as it is: a run says what is wrong with it.
    """
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


def _finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _ranged(field: str, kind: str, numbers: Sequence[Any], methods: Sequence[str]) -> Dimension:
    if kind not in KINDS:
        raise unknown_name("kind of range", kind, KINDS)
    shown = f"{field}: {kind}({', '.join(map(str, numbers))})"
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise UsageError(f"{shown}: {number!r} is not a number")
    if kind == "range":
        return _listed(field, _range(shown, numbers), methods)
    if len(numbers) != 2 or not numbers[0] <= numbers[1]:
        raise UsageError(f"{shown}: two numbers are needed, the lower one first")
    if kind == "log" and numbers[0] <= 0:
        raise UsageError(f"{shown}: a logarithm needs numbers above 0")
    if kind == "integers" and any(number != int(number) for number in numbers):
        raise UsageError(f"{shown}: whole numbers are needed, or uniform({numbers[0]}, {numbers[1]})")
    found: Kind = "uniform" if kind == "uniform" else "log" if kind == "log" else "integers"
    return Dimension(field, found, low=float(numbers[0]), high=float(numbers[1]))


def _range(shown: str, numbers: Sequence[int | float]) -> list[Any]:
    """As Python's range, without the last number, also for fractions; in tenths that are tenths."""
    if not 2 <= len(numbers) <= 3:
        raise UsageError(f"{shown}: start, stop and step are needed, stop is left out as in Python")
    start, stop, step = (*(Decimal(str(number)) for number in numbers), Decimal(1))[:3]
    try:
        count = math.ceil((stop - start) / step)
    except InvalidOperation:
        count = 0
    except ArithmeticError:
        raise UsageError(f"{shown}: a step of 0 goes nowhere") from None
    if not 0 < count <= MOST_LISTED:
        raise UsageError(f"{shown}: has {'no values' if count <= 0 else 'too many values'}; stop is left out")
    whole = all(isinstance(number, int) for number in numbers)
    return [int(start + i * step) if whole else float(start + i * step) for i in range(count)]


def _parts(text: str) -> list[str]:
    """The parts between commas that are in no bracket and no quotes."""
    parts, depth, quoted = [""], 0, False
    for mark in text:
        quoted ^= mark == '"'
        depth += 0 if quoted else (mark in "[(") - (mark in "])")
        if mark == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += mark
    return [part.strip() for part in parts if part.strip()]


def _value(text: str) -> Any:
    """JSON where it can be read as JSON, else the text itself."""
    try:
        return json.loads(text, parse_constant=str)
    except json.JSONDecodeError:
        return text
