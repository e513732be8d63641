"""Notes about the runs behind a table: what they have in common, and which of their results do not compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.results.scores import TITLES, Score

RECIPE = ("optimizer", "lr", "epochs", "batch_size")
"""The fields of a changed recipe that a note names."""


def setting(variants: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """What runs, each a method and its `variant`, have in common, and how the fields of a changed recipe differ."""
    values: dict[str, dict[str, list[str]]] = {}
    for method, facts in variants:
        for name, value in facts.items():
            values.setdefault(name, {}).setdefault(value, []).append(TITLES.get(method, method))
    shared = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    parts = [f"backbone {shared['backbone']}"] if "backbone" in shared else []
    if shared.get("pretrained", "default") != "default":
        parts.append(f"weights {shared['pretrained']}")
    if "shots" in shared:
        parts.append(f"{shared['shots']} shot{'s' * (shared['shots'] != '1')}")
    if shared.get("picks") == "imported":
        parts.append("imported few-shot picks")
    if "precision" in shared:
        parts.append(shared["precision"])
    if shared.get("recipe") == "custom":
        fields = ", ".join(
            _recipe_field(name, values[f"recipe.{name}"]) for name in RECIPE if f"recipe.{name}" in values
        )
        parts.append(f"not the published recipes but a changed one: {fields}")
    elif "recipe" in shared:
        parts.append({"published": "each method's own published recipe", "procap": "ProCAP's recipe"}[shared["recipe"]])
    return [f"Setting: {'; '.join(parts)}."] if parts else []


def not_as_published(changed: Mapping[str, str]) -> list[str]:
    """How data sets differ from published ones, by name."""
    return [f"{name}: {words}; not comparable with published figures." for name, words in changed.items()]


def unequal(scores: Sequence[Score]) -> list[str]:
    """Targets whose images are not the same for all runs: their accuracies do not compare."""
    digests: dict[str, set[tuple[int, str]]] = {}
    for score in scores:
        key = (score.result.dataset_size, score.result.manifest_digest)
        digests.setdefault(str(score.target), set()).add(key)
    return [
        f"{target} was evaluated on {len(found)} different packings of its data set: these numbers do not compare."
        for target, found in digests.items()
        if len(found) > 1
    ]


def _recipe_field(name: str, found: Mapping[str, Sequence[str]]) -> str:
    if len(found) == 1:
        return f"{name} {next(iter(found))}"
    values: dict[str, list[str]] = {}
    for value, methods in found.items():
        values.setdefault(", ".join(dict.fromkeys(methods)), []).append(value)
    return f"{name} " + " / ".join(f"{_listed(own)} ({methods})" for methods, own in values.items())


def _listed(words: Sequence[str]) -> str:
    """1, 2 and 4."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
