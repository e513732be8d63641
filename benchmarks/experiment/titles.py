"""Name the methods as tables and plots print them, and order them."""

from __future__ import annotations

from collections.abc import Iterable

from procap.methods import METHODS, title_and_colour


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
