"""From flags to runs: what a person types becomes `RunConfig`s, targets and a `RuntimeConfig`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli.flags import EngineFlags, RecipeFlags, RuntimeFlags, SelectionFlags
from benchmarks.console.output import quoted
from procap.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from runner.config import RunConfig, RuntimeConfig, Target


def names(text: str) -> list[str]:
    """The names of a comma list, each once, in their order."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(text: str, flag: str, example: str = "1,2,3") -> list[int]:
    """Whole numbers of a comma list. Raises UsageError naming the flag and the part that is none."""
    parts = names(text)
    for part in parts:
        if not part.isascii() or not part.isdigit():
            raise UsageError(f"{flag}: '{part}' is not a whole number of 0 or more; for example {flag} {example}")
    return list(dict.fromkeys(map(int, parts)))


def shot_count(text: str) -> int:
    """Training images per class, 0 for all of them."""
    if text.lower() in ("full", "all"):
        return 0
    parts = names(text)
    if len(parts) != 1 or not (parts[0].isascii() and parts[0].isdigit()):
        raise UsageError(f"--shots {text}: one number of images per class is needed, or full for all of them")
    return int(parts[0])


def shot_counts(text: str) -> tuple[int, ...]:
    """The numbers of shots of a comma list, each once; none for an empty one; all images, which is 0, stand alone."""
    if len(names(text)) < 2:
        return (shot_count(text),) if text else ()
    parts = names(text)
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UsageError(f"--shots {text}: numbers of 1 or more are needed, as in --shots 1,2,4; full stands alone")
    return tuple(dict.fromkeys(map(int, parts)))


def method_names(text: str) -> list[str]:
    """The chosen methods; "all" is every one that is installed. Raises UsageError with the nearest known name."""
    from procap.methods import method_class, method_paths

    known = list(method_paths())
    if not names(text):
        raise UsageError(f"--methods is missing; for example --methods procap; known: {', '.join(known)}")
    chosen = known if text == "all" else names(text)
    for name in chosen:
        method_class(name)
    return chosen


def dataset_names(text: str, data: Path | None = None) -> list[str]:
    """The chosen data sets to train on, each once.

    "all" is every one of the catalogue with training images that needs no raw files, "paper" the eleven that the paper
    trains on, which must be packed in `data`. Other names are those of the catalogue and of what is packed in `data`.
    Raises UsageError or DataUsageError for an unknown name, a test set, and a set of the paper that is not packed.
    """
    from shards.catalogue import CATALOGUE
    from shards.resolve import known

    able = [name for name, dataset in CATALOGUE.items() if not dataset.test_only and dataset.source != "folder"]
    if not names(text):
        raise UsageError(f"--datasets is missing; for example --datasets shapes; known: {', '.join(able)}")
    groups = {"all": lambda: able, "paper": lambda: paper_names(data)}
    chosen = [known(name, data) for part in names(text) for name in (groups[part]() if part in groups else [part])]
    for dataset in chosen:
        if dataset.test_only:
            raise UsageError(
                f"'{dataset.name}' has test images only, nothing can be trained on it; "
                f"test on it with `procap eval --targets {dataset.name}`, train on one of: {', '.join(able)}"
            )
    return list(dict.fromkeys(dataset.name for dataset in chosen))


def paper_names(data: Path | None) -> list[str]:
    """The eleven sets that the paper trains on. Raises UsageError naming those that are not packed in `data`."""
    from shards.catalogue import CATALOGUE
    from shards.resolve import is_packed

    paper = [name for name, dataset in CATALOGUE.items() if dataset.source == "folder" and not dataset.test_only]
    missing = [name for name in paper if data is None or not is_packed(data, name)]
    if missing:
        where = f" --data {quoted(data)}" if data else ""
        raise UsageError(
            f"'paper' is the {len(paper)} training sets of the paper; {len(missing)} are not packed: "
            f"{', '.join(missing)}; pack them: procap data pack {' '.join(missing)} --raw FOLDER{where}"
        )
    return paper


def option_values(given: Iterable[str], methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Options per method from `key=value` (for every chosen method) and `method.key=value`.

    A value is JSON where it can be read as JSON (4, 0.5, false, null, [1, 2]), else the text itself.
    """
    options: dict[str, dict[str, Any]] = {method: {} for method in methods}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--option {item}: write it as key=value, for example --option n_ctx=4")
        value = _plain_value(text)
        owner, dot, field = key.strip().partition(".")
        if dot and owner not in options:
            raise UsageError(f"--option {item}: method '{owner}' is not among the chosen: {', '.join(options)}")
        for method in [owner] if dot else options:
            options[method][field if dot else owner] = value
    return options


def _plain_value(text: str) -> Any:
    """JSON where it can be read as JSON, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def overrides(training: RecipeFlags) -> dict[str, Any]:
    """The recipe fields that flags change. Raises UsageError for what is not key=value, or is said twice."""
    given = {"epochs": training.epochs, "batch_size": training.batch_size, "lr": training.lr}
    changes = {name: value for name, value in given.items() if value is not None}
    for item in training.recipe_field or ():
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--recipe-field {item}: write it as key=value, for example --recipe-field flip=false")
        if key.strip() in changes:
            raise UsageError(f"--recipe-field {item}: {key.strip()} is given already")
        changes[key.strip()] = _plain_value(text)
    return changes


def configs(selection: SelectionFlags, training: RecipeFlags, data: Path | None = None) -> list[RunConfig]:
    """Every run that the flags describe, method by method within a data set, seeds innermost.

    data: where the data sets are packed.
    """
    from benchmarks.cli.data_few_shot import samples_digest
    from runner.config import plan_run

    methods = method_names(selection.methods)
    datasets = dataset_names(selection.datasets, data)
    options = option_values(training.option or (), methods)
    shots = shot_count(selection.shots or "16")
    samples = samples_digest(training.few_shot_samples, datasets, shots)
    return [
        plan_run(
            method=method,
            dataset=dataset,
            classes=selection.classes or "base",
            shots=shots,
            seed=seed,
            backbone=selection.backbone or "mini",
            pretrained=selection.pretrained or None,
            precision=selection.precision or "fp32",
            recipe=training.recipe or "published",
            overrides=overrides(training),
            options=options[method],
            picks=samples,
            data=data,
        )
        for dataset in datasets
        for method in methods
        for seed in (numbers(selection.seeds, "--seeds") or [1])
    ]


def targets_of(config: RunConfig, text: str = "", data: Path | None = None) -> list[Target]:
    """The targets named in `text`; without any, the halves (or all classes) of the data set that was trained on.

    A run on a half of the base half is there to choose by: it is evaluated on val (on train where a set has no val, as
    ImageNet), and the test split is left alone.
    """
    from runner.config import Target
    from shards.resolve import known

    if names(text):
        return [Target.parse(part, data) for part in names(text)]
    if config.classes.startswith("dev-"):
        split = "val" if "val" in known(config.dataset, data).counts else "train"
        return [Target.recorded(f"{config.dataset}:{half}:{split}") for half in ("dev-base", "dev-novel")]
    halves = ("all",) if config.classes == "all" else ("base", "novel")
    return [Target.recorded(f"{config.dataset}:{half}") for half in halves]


def workplace(
    place: RuntimeFlags, limit: int | None = None, features: Path | None = None, parallel: EngineFlags | None = None
) -> RuntimeConfig:
    """Where and how the runs happen. Raises UsageError where a file is in the place of a folder.

    features: where image features are kept, None to compute them every time.
    """
    from runner.config import RuntimeConfig

    parallel = parallel or EngineFlags()
    data, (results, store) = place.data_root(), place.results_root()
    for flag, folder in (("--data", data), ("--results", results)):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{flag} {folder} is a file; name a folder")
    return RuntimeConfig(
        data=data,
        results=results,
        device=place.device,
        workers=place.workers,
        limit=limit,
        tracking_uri=place.tracking or None,
        features=features,
        accelerate=place.accelerate,
        timeout=place.timeout,
        engine=parallel.engine,
        zero_stage=parallel.zero_stage,
        deepspeed_json=parallel.deepspeed_config,
        store=store,
    )


def results_at(given: str) -> Path:
    """The folder of the results that `--results` names; of a URL, with every document that is there."""
    from runner.remote_results import RemoteResults, results_root
    from shards.home import cache_home

    folder, url = results_root(given, cache_home())
    RemoteResults(url, folder).pull_all()
    return folder


def chooser(selection: SelectionFlags, recorded: Callable[[], Iterable[str]]) -> Callable[[RunConfig], bool]:
    """Whether a run that is there is among those that the flags select; a flag that was not given selects all.

    recorded: the data sets of the runs that are there, asked only for names that the catalogue does not have.
    Raises UsageError or DataUsageError for an unknown method or data set.
    """
    from procap.methods import method_paths

    wanted: Mapping[str, list[Any]] = {
        "method": names(selection.methods),
        "dataset": [_recorded_name(name, recorded) for name in names(selection.datasets)],
        "seed": numbers(selection.seeds, "--seeds"),
        "shots": [shot_count(selection.shots)] if selection.shots else [],
        "classes": names(selection.classes),
        "backbone": names(selection.backbone),
        "pretrained": names(selection.pretrained),
        "precision": names(selection.precision),
    }
    known = method_paths()
    for name in wanted["method"]:
        if name not in known:
            raise unknown_name("method", name, known)
    return lambda config: all(not values or getattr(config, field) in values for field, values in wanted.items())


def _recorded_name(name: str, recorded: Callable[[], Iterable[str]]) -> str:
    from shards.catalogue import CATALOGUE, find
    from shards.errors import DataUsageError

    try:
        return find(name).name
    except DataUsageError:
        own = set(recorded())
        if name.lower() in own:
            return name.lower()
        raise unknown_name("data set", name, own | set(CATALOGUE)) from None
