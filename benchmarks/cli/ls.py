"""`procap ls`: list the names that other commands accept, and existing runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from benchmarks.cli.flags import Data, FilterFlags, Results, command, command_line
from benchmarks.cli.selection import run_filter
from benchmarks.console.output import JSON_STREAM, columns, note, note_unreadable, plural, show, show_json
from benchmarks.console.parse import parse_methods
from benchmarks.experiment.profiles import PAPER
from benchmarks.experiment.titles import describe_settings, title_method, title_variants
from benchmarks.results.frame import list_selected_runs, open_results
from benchmarks.suites import SUITES, load_suite
from procap.errors import UsageError, UserError, unknown_name
from procap.methods import METHODS, describe_method, method_class
from procap.methods.plugins import describe_unexpected
from procap.recipe import format_value
from runner.config import RunConfig
from runner.run_folders import RunFolder, find_runs
from runner.run_state import RunState, read_stored_state
from runner.tracking.content import result_metrics
from shards.catalogue import CATALOGUE
from shards.default_paths import data_root
from shards.resolve import is_packed, packed_names, resolve_dataset

DATASET_FIELDS = ["name", "title", "test_only", "template", "aliases", "licence", "description"]
COLUMNS = ("state", "date", "method", "dataset", "accuracy", "base", "novel", "run")
WIDTH = 120
"""Characters of a line. The path of a run has its method and data set too."""
Listing = tuple[str, list[dict[str, Any]]]


@command("procap ls methods", "procap ls methods coop", "procap ls datasets --json", "procap ls runs --methods procap")
def ls(
    selection: FilterFlags,
    what: Annotated[str, typer.Argument(metavar="methods|datasets|backbones|words|suites|runs", help="what to list")],
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="methods to show with all options")] = None,
    results: Results = "results",
    data: Data = "",
) -> int:
    """List methods, data sets, backbones, words that `mini` knows, suites or runs; --methods and so on select runs.

    `ls methods NAME` prints the options of a method with their defaults and meaning, and its recipe.
    """
    listings: dict[str, Callable[[], Listing]] = {
        "methods": lambda: _methods(parse_methods(",".join(names or ["all"])), bool(names)),
        "datasets": lambda: _datasets(data_root(data)),
        "backbones": _backbones,
        "words": _words,
        "suites": _suites,
        "runs": lambda: _runs(results, selection, unreadable),
    }
    unreadable: dict[str, object] = {}
    if what not in listings:
        raise unknown_name("list", what, listings)
    if what != "runs" and (chosen := command_line(selection)):
        raise UsageError(f"{chosen.split()[0]} selects runs, not {what}: procap ls runs {chosen}")
    if names and what != "methods":
        raise UsageError(f"ls {what} takes no name: '{names[0]}'")
    text, rows = listings[what]()
    if rows:
        show(text)
    show_json(rows)
    return max(note_unreadable(unreadable), any(row.get("state") == "broken" for row in rows))


def _methods(names: Sequence[str], whole: bool) -> Listing:
    """List methods. whole: with their options and recipes, which --json has anyway and which need torch."""
    rows: list[dict[str, Any]] = []
    for name in names:
        row: dict[str, Any] = {"name": name, "summary": "", "recipe": None, "options": {}, "selection": "", "uses": ""}
        try:
            texts = describe_method(name)
            row |= {field: texts[field] for field in ("summary", "selection", "uses")}
            if whole or JSON_STREAM.get() or name not in METHODS:
                method = method_class(name)
                row["recipe"] = method.recipe().model_dump(mode="json")
                row["options"] = {
                    option: {"default": field.get_default(call_default_factory=True), "description": field.description}
                    for option, field in method.Options.model_fields.items()
                }
        except UsageError as error:
            row["summary"] = str(error)
        except Exception as error:
            if name in METHODS:
                raise
            row["summary"] = describe_unexpected(error)
        rows.append(row)
    if whole:
        return "\n\n".join(map(_format_method, rows)), rows
    uses = [row["uses"].replace("few-shot images", "shots").replace("class names", "names") for row in rows]
    width = WIDTH - 4 - max(len(row["name"]) for row in rows) - max(map(len, uses))
    summaries = [textwrap.shorten(row["summary"], width, placeholder=" ...") for row in rows]
    shown = list(zip([row["name"] for row in rows], uses, summaries, strict=True))
    return columns(("method", "looks at", "what it is; its options: procap ls methods NAME"), shown), rows


def _format_method(row: Mapping[str, Any]) -> str:
    """Format a method with its options, one per line, and what its recipe sets."""
    lines = [f"{row['name']}: {row['summary']}", f"chosen by: {row['selection']}; looks at: {row['uses']}"]
    if row["recipe"]:
        method = method_class(row["name"])
        unread = {*method.recipe().unread(), *method.unread_fields(method.Options())}
        read = {name: value for name, value in row["recipe"].items() if value is not None and name not in unread}
        recipe = " ".join(f"{name}={format_value(value)}" for name, value in read.items())
        lines += textwrap.wrap(f"recipe: {recipe}", WIDTH - 2, subsequent_indent="  ")
    starts = {name: f"  {name}={format_value(option['default'])}  " for name, option in row["options"].items()}
    width = max(map(len, starts.values()), default=0)
    for name, start in starts.items():
        text = row["options"][name]["description"] or "-"
        lines += textwrap.wrap(text, WIDTH - 2, initial_indent=start.ljust(width), subsequent_indent=" " * width)
    return "\n".join(lines)


def _suites() -> Listing:
    """List the suites with the runs and evaluations that each has alone, with the paper's data sets."""
    rows: list[dict[str, Any]] = []
    for suite in map(load_suite, SUITES):
        targets = {run.path: run.spec.targets for run in suite.plan(suite.options(PAPER))}
        costs = {"runs": len(targets), "evaluations": sum(map(len, targets.values()))}
        rows.append({name: getattr(suite, name) for name in ("name", "title", "methods", "seeds")} | costs)
    shown = [(row["name"], row["title"], len(row["methods"]), row["runs"], row["evaluations"]) for row in rows]
    return columns(("suite", "what it is", "methods", "runs", "evaluations"), shown), rows


def _datasets(root: Path) -> Listing:
    names = dict.fromkeys((*CATALOGUE, *packed_names(root)))
    # The server of a mirror cannot list its data sets, and is asked for each.
    packed = [name for name in names if is_packed(root, name)]
    rows: list[dict[str, Any]] = []
    shown: list[tuple[object, ...]] = []
    for name in names:
        try:
            dataset = resolve_dataset(name, root) if name in packed else CATALOGUE[name]
        except UserError as error:
            note(f"procap: {error}")
            continue
        whole = name not in CATALOGUE or dict(CATALOGUE[name].counts) == dict(dataset.counts)
        row = {"images": dict(dataset.counts), "packed": name in packed, "complete": whole}
        row |= {field: getattr(dataset, field) for field in DATASET_FIELDS}
        rows.append(row | {"classes": dataset.num_classes, "get": dataset.raw.get if dataset.raw else ""})
        state = "no" if name not in packed else "yes" if whole else "in part"
        counts = (f"{count:,}" if (count := dataset.counts.get(split)) else "-" for split in ("train", "val", "test"))
        what = textwrap.shorten(dataset.description, 64, placeholder=" ...")
        shown.append((dataset.name, dataset.num_classes, "/".join(counts), state, what))
    return columns(("data set", "classes", "train/val/test", "packed", "what it is"), shown), rows


def _backbones() -> Listing:
    from procap.weights.architectures import model_configs, plain_towers
    from procap.weights.loading import published_weights

    rows: list[dict[str, Any]] = []
    for name, config in model_configs().items():
        plain, vision, text = plain_towers(config), config["vision_cfg"], config["text_cfg"]
        admitted = "all" if len(plain) == 2 else f"{plain[0]} only" if plain else "features only"
        patch = f"patch {vision['patch_size']}" if vision.get("patch_size") else "ResNet"
        widths = f"widths {vision.get('width', '-')}/{text.get('width', '-')}"
        about = f"{vision['image_size']} px, {vision.get('timm_model_name', patch)}, {widths}"
        about += ", QuickGELU" * config.get("quick_gelu", False)
        rows.append({"name": name, "methods": admitted, "note": about, "tags": list(published_weights(name))})
    shown = [(row["name"], row["methods"], row["note"]) for row in rows]
    headers = ("backbone", "methods", "what it is; below it the weights for --pretrained")
    return _write_below(columns(headers, shown), [", ".join(row["tags"]) for row in rows]), rows


def _write_below(table: str, texts: Sequence[str]) -> str:
    """Write a text below each row of a table, unless it is empty."""
    title, rule, *rows = table.splitlines()
    lines = [title, rule]
    for row, text in zip(rows, texts, strict=True):
        lines += [row, *textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


def _words() -> Listing:
    """List the words of the class names that `mini` was trained on, those of the generated data."""
    texts = (text for dataset in CATALOGUE.values() if dataset.images_from == "world" for text in dataset.classnames)
    # Single letters are left out: those of the glyphs, and articles.
    words = sorted({word for text in texts for word in text.split() if len(word) > 1})
    return textwrap.fill(" ".join(words), 100), [{"word": word} for word in words]


def _runs(results: str, selection: FilterFlags, unreadable: dict[str, object]) -> Listing:
    root = open_results(results)
    rows = [_describe_run(*run) for run in list_selected_runs(root, unreadable.__setitem__, run_filter(selection))]
    if not rows:
        note(f"{plural(len(find_runs(root)), 'run')} below {results}, none that fits")
    elif any(row["accuracy"] is not None for row in rows):
        note("accuracy: on the run's own data set, in %; after base classes the harmonic mean of base and novel")
    # In place of a frame, of which the titles need these columns alone.
    columns_of = {"method": "method", "dataset": "dataset", "target": "classes", "path": "run", "settings": "settings"}
    values = {column: [row[name] for row in rows] for column, name in columns_of.items()}
    titles = title_variants(SimpleNamespace(**values))
    for row, title in zip(rows, titles, strict=True):
        row["settings"] = title.removeprefix(title_method(row["method"])).removeprefix(", ")
    lines = [f"{row['state']}: {row['run']}: {row['reason']}" for row in rows if row["reason"]]
    table = columns(COLUMNS, [_format_run(row, COLUMNS) for row in rows])
    if max(map(len, table.splitlines())) > WIDTH:
        shown = [name for name in COLUMNS if name not in ("method", "dataset")]
        table = columns(shown, [_format_run(row, shown) for row in rows])
    return "\n".join([_write_below(table, [row["settings"] for row in rows]), *lines]), rows


def _describe_run(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """Collect what is listed of a run; its state is `broken` if a file cannot be read."""
    row: dict[str, Any] = {name: getattr(config, name) for name in ("method", "dataset", "classes", "shots", "seed")}
    row |= {"lr": config.recipe.lr, "epochs": config.recipe.epochs, "options": dict(config.options)}
    row |= {"chosen_on_test": config.chosen_on_test, "imported": None}
    row["settings"] = {name: value for name, value in describe_settings(config).items() if name != "shots"}
    metrics: dict[str, float] = {}
    written, state = None, read_stored_state(folder)
    try:
        if training := folder.read_training():
            written = training.written.replace("T", " ")[:16]
            row["imported"] = training.imported.name if training.imported else None
        metrics = result_metrics(config, evaluations := folder.read_evaluations())
        # Two classes have no halves: the accuracy after base classes is then that on all.
        if "accuracy/all" in metrics and all(result.num_classes <= 2 for result in evaluations):
            metrics.setdefault("accuracy", metrics["accuracy/all"])
    except UserError as error:
        state = RunState("broken", reason=str(error))
    row |= {"state": state.status, "reason": state.reason.removeprefix(f"{config.path}: "), "date": written}
    names = {"accuracy": "accuracy", "base": "accuracy/base", "novel": "accuracy/novel"}
    row |= {column: metrics.get(name) for column, name in names.items()}
    return {"run": config.path, **row, "evaluated": [path.stem for path in folder.result_files()]}


def _format_run(row: Mapping[str, Any], shown: Sequence[str]) -> tuple[object, ...]:
    cells = dict(row)
    mark = " ‡" * row["chosen_on_test"]
    cells |= {name: "-" if row[name] is None else f"{row[name]:.2f}{mark}" for name in ("accuracy", "base", "novel")}
    cells |= {"date": row["date"] or "-", "state": row["state"] + ", imported" * bool(row["imported"])}
    return tuple(cells[name] for name in shown)
