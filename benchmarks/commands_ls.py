"""`procap ls`: what can be named in other commands, and the runs that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flags import Output, data_home
from benchmarks.output import columns, note, quoted, show, show_json
from procap.errors import UserError, unknown_name

Listing = tuple[str, list[dict[str, Any]]]


def ls(what: str, *, results: Path, data: Path | None, output: Output) -> int:
    """See `procap ls --help`."""
    listings: dict[str, Callable[[], Listing]] = {
        "methods": _methods,
        "datasets": lambda: _datasets((data or data_home()).expanduser()),
        "backbones": _backbones,
        "runs": lambda: _runs(results.expanduser()),
    }
    if what not in listings:
        raise unknown_name("list", what, listings)
    text, rows = listings[what]()
    show(text)
    if output.json:
        show_json(rows)
    return 0


def _methods() -> Listing:
    from procap.methods import method_class, method_specs

    rows: list[dict[str, Any]] = []
    for spec in method_specs():
        recipe = method_class(spec.name).recipe()
        fields = method_class(spec.name).Options.model_fields
        options = {
            name: {"default": field.get_default(call_default_factory=True), "description": field.description or ""}
            for name, field in fields.items()
        }
        rows.append(
            {"name": spec.name, "summary": spec.summary, "recipe": recipe.model_dump(mode="json"), "options": options}
        )
    shown = [(row["name"], _recipe_line(row["recipe"]), row["summary"]) for row in rows]
    return columns(("method", "published recipe (16 shots)", "what it is"), shown), rows


def _recipe_line(recipe: dict[str, Any]) -> str:
    if not recipe["epochs"]:
        return "no training"
    return f"{recipe['optimizer']} {recipe['lr']:g}, {recipe['epochs']} epochs, batch {recipe['batch_size']}"


def _datasets(root: Path) -> Listing:
    from shards.catalogue import CATALOGUE
    from shards.manifest import FILE

    rows: list[dict[str, Any]] = [
        {
            "name": dataset.name,
            "classes": dataset.classes,
            "images": dict(dataset.counts),
            "packed": (root / dataset.name / FILE).exists(),
            "test_only": dataset.test_only,
            "template": dataset.template,
            "aliases": list(dataset.aliases),
            "licence": dataset.licence,
            "description": dataset.description,
        }
        for dataset in CATALOGUE.values()
    ]
    shown = [
        (
            row["name"],
            row["classes"],
            "/".join(str(row["images"].get(split, "-")) for split in ("train", "val", "test")),
            "yes" if row["packed"] else "no",
            row["description"],
        )
        for row in rows
    ]
    return columns(("data set", "classes", "train/val/test", "packed", "what it is"), shown), rows


def _backbones() -> Listing:
    from procap.loading import backbones

    rows = [{"name": name, "tags": list(tags), "note": remark} for name, tags, remark in backbones()]
    shown = [(row["name"], row["note"] or "-", _some(row["tags"])) for row in rows]
    return columns(("backbone", "what it is", "weights"), shown), rows


def _some(tags: Sequence[str], most: int = 4) -> str:
    more = f", and {len(tags) - most} more" if len(tags) > most else ""
    return ", ".join(tags[:most]) + more or "-"


def _runs(results: Path) -> Listing:
    from benchmarks.scores import run_folders

    if not results.is_dir():
        kind = "a file" if results.exists() else "not there"
        raise UserError(f"the results folder {results} is {kind}; name another with --results, or train into it")
    rows = []
    for folder, config in run_folders(results):
        state = "finished" if folder.train_file.exists() else "unfinished"
        rows.append({"run": config.path, "state": state, "evaluated": [path.stem for path in folder.eval_files()]})
    if not rows:
        command = f"procap train --methods maple --datasets shapes --results {quoted(results)}"
        note(f"no runs below {results}; make one: {command}")
    shown = [(row["run"], row["state"], " ".join(row["evaluated"]) or "-") for row in rows]
    return columns(("run", "state", "evaluated on"), shown), rows
