"""Convert flags to `RunConfig`s, evaluation targets and a `RuntimeConfig`."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import (
    ChoiceFlags,
    EvalFlags,
    RecipeFlags,
    SelectionFlags,
    StorageFlags,
    given_options,
    given_values,
)
from benchmarks.console.output import note, plural, quote
from benchmarks.console.parse import (
    expand_datasets,
    expand_methods,
    expand_names,
    parse_assignments,
    parse_datasets,
    parse_integers,
    parse_methods,
    parse_options,
    parse_shot_count,
    parse_shot_counts,
    split_names,
)
from benchmarks.experiment.published import table1_methods
from benchmarks.experiment.suite import Suite
from benchmarks.experiment.titles import sort_methods
from benchmarks.results.frame import Selected, list_selected_runs
from procap.errors import UsageError, UserError, check_names, validate
from procap.methods import method_class, method_paths
from procap.weights.architectures import canonical_name, named_architecture
from runner.config import PRECISIONS, EvalSettings, RunConfig, RuntimeConfig, Target
from runner.planning import can_classify, check_read, control_options, plan_run
from runner.remote_results import results_root
from runner.run_folders import find_runs
from runner.session import Run, Session
from shards.catalogue import find_or_none
from shards.default_paths import cache_home, data_root
from shards.image_selection import parse_classes, select_labels
from shards.names import join_first
from shards.resolve import resolve_dataset
from shards.uneven_samples import check_sampling

HASH_PREFIX = re.compile("[0-9a-f]{1,8}")


def recipe_overrides(recipe_flags: RecipeFlags) -> dict[str, Any]:
    """Parse the recipe fields that flags change."""
    flags = {"epochs": recipe_flags.epochs, "batch_size": recipe_flags.batch_size, "lr": recipe_flags.lr}
    # As texts, because a field that is given in both ways is refused.
    texts = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return parse_assignments([*texts, *(recipe_flags.recipe_field or ())], "--recipe-field")


def plan_selected_runs(
    selection: SelectionFlags, recipe_flags: RecipeFlags, data: Path | None = None, task: str | None = None
) -> list[RunConfig]:
    """Make the runs that the flags describe: by data set, then method, then seed. task: see `plan_run`."""
    methods = parse_methods(selection.methods, table1_methods()) if selection.methods else []
    datasets = parse_datasets(selection.datasets, data)
    methods = methods or [*default_methods(datasets, selection.backbone or "mini", data)[:1]] or parse_methods("")
    named_architecture(selection.backbone or "mini", selection.pretrained or None)
    options = parse_options(given_options(recipe_flags.option, recipe_flags.unlabelled), methods)
    kept, overrides = trainable_methods(selection.methods, methods, options), recipe_overrides(recipe_flags)
    names = ("classes", "sampling", "backbone", "pretrained", "precision")
    chosen: dict[str, Any] = {name: getattr(selection, name) for name in names} | {"recipe": recipe_flags.recipe}
    chosen["shots"] = selection.shots and parse_shot_count(selection.shots)
    # The others have the defaults of `RunChoices`.
    chosen = {name: value for name, value in chosen.items() if value != ""}
    configs = [
        plan_run(
            method=method,
            dataset=dataset,
            seed=seed,
            task=task,
            overrides=overrides,
            options={**control_options(method, recipe_flags.recipe), **options[method]},
            data=data,
            **chosen,
        )
        for dataset in datasets
        for method in kept
        for seed in (parse_integers(selection.seeds, "--seeds") or [1])
    ]
    check_read(configs, overrides)
    return configs


def default_methods(datasets: Iterable[str], backbone: str, data: Path | None) -> tuple[str, ...]:
    """Return methods that read images alone for a user's own data under `mini`, with a note; others have no default."""
    if backbone != "mini" or {resolve_dataset(name, data).images_from for name in datasets} != {"own"}:
        return ()
    note(
        "procap: note: mini knows few class names: methods that read them are left out on your data; to have them, "
        "name a CLIP that knows yours (--backbone ViT-B/16) or --methods"
    )
    return "probe", "ncm"


def start_runs(configs: Sequence[RunConfig], init: str, session: Session) -> list[RunConfig]:
    """Let runs start from the finished run `init`: its folder, or a unique prefix of its hash."""
    from runner.earlier_runs import start_from

    earlier = find_run(Path(init), session)
    return [start_from(config, earlier, session.runtime.results) for config in configs]


def trainable_methods(text: str, methods: Iterable[str], *options: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Leave out methods of the groups in `text`, such as "all", for which `options` lack one that their training needs.

    Methods that are named one by one are kept: their training says what is missing.
    """
    kept, named = [], expand_names(text, {}, method_paths())
    for method in methods:
        cls = method_class(method)
        if method in named or not all(cls.missing_option(values.get(method, {})) for values in options):
            kept.append(method)
        else:
            needed = f"--option {method}.{cls.required_option}=..."
            # A warning, which is shown once however many suites are planned.
            warnings.warn(
                f"--methods {text} leaves out {method}, whose training needs {needed} (docs/methods.md)", stacklevel=2
            )
    return tuple(kept)


def suite_changes(flags: ChoiceFlags, data: Path) -> dict[str, Any]:
    """Parse the options of a suite that flags change; those that are not given are left out."""
    named_architecture(flags.backbone or "mini", flags.pretrained or None)
    changes = {
        "methods": sort_methods(parse_methods(flags.methods, table1_methods())) if split_names(flags.methods) else (),
        "datasets": tuple(parse_datasets(flags.datasets, data)) if split_names(flags.datasets) else (),
        "seeds": tuple(parse_integers(flags.seeds, "--seeds")),
        "shots": parse_shot_counts(flags.shots),
        "backbone": flags.backbone,
        "pretrained": flags.pretrained,
        "precision": flags.precision,
    }
    return {name: value for name, value in changes.items() if value}


def refuse_unread(suite: Suite, *groups: object) -> None:
    """Raise UsageError if a flag of `groups` is given that has no effect on the suite."""
    if unread := [f"--{flag}" for flag in given_values(*groups) if flag in suite.unread]:
        raise UsageError(f"{suite.name} takes no {', '.join(unread)}, which would have no effect")


def default_targets(config: RunConfig, data: Path | None) -> list[Target]:
    """Return both halves of the training data set, or all classes if they were trained on or no half has two classes.

    A half of one class is left out, as every answer on it is right, and so is one that the method has no rule for. A
    data set that is not here, of which results may be, has both halves. A run on half of the base classes, for model
    selection, is evaluated on val, else train (ImageNet), never on test.
    """
    if config.classes.startswith("dev-"):
        split = "val" if "val" in resolve_dataset(config.dataset, data).counts else "train"
        return [Target.parse_unchecked(f"{config.dataset}:{half}:{split}") for half in ("dev-base", "dev-novel")]
    halves = ["base", "novel"] if config.classes != "all" else []
    with suppress(UsageError):
        labels = range(resolve_dataset(config.dataset, data).num_classes)
        halves = [half for half in halves if len(select_labels(labels, half)) > 1]
    targets = [Target.parse_unchecked(f"{config.dataset}:{half}") for half in halves or ["all"]]
    return [target for target in targets if can_classify(config, target, data)]


def runtime_config(flags: StorageFlags, evaluation: EvalFlags | None = None) -> RuntimeConfig:
    """Convert flags to the runtime; those that are called like its fields are passed on.

    Raises UsageError for a wrong setting of the evaluation; empty ones are the default.
    """
    evaluation, (results, url) = evaluation or EvalFlags(), results_root(flags.results, cache_home())
    others = ("data", "results", "tracking", "download")
    names = [field.name for field in fields(EvalFlags) if field.name != "limit"]
    chosen = {name.removeprefix("eval_"): value for name in names if (value := getattr(evaluation, name))}
    return RuntimeConfig(
        data=data_root(flags.data),
        results=results,
        limit=evaluation.limit,
        evaluation=validate(EvalSettings, chosen, "evaluation"),
        tracking_uri=flags.tracking or None,
        results_url=url,
        **{name: value for name, value in vars(flags).items() if name not in others},
    )


def run_filter(selection: SelectionFlags) -> Selected:
    """Make a predicate that tests whether the flags select a run: by its path alone, what it may be."""
    # An empty list selects every run, also those of methods that are not installed.
    methods = expand_methods(selection.methods, table1_methods()) if selection.methods.lower() != "all" else []
    precisions, backbones, tags = map(split_names, (selection.precision, selection.backbone, selection.pretrained))
    check_names("method", methods, method_paths())
    check_names("precision", precisions, PRECISIONS)
    for name in backbones:
        named_architecture(name, None)
    datasets = [(find_or_none(name), name.lower()) for name in expand_datasets(selection.datasets)]
    chosen: Mapping[str, Sequence[Any]] = {
        "method": methods,
        "dataset": [dataset.name if dataset else name for dataset, name in datasets],
        "seed": parse_integers(selection.seeds, "--seeds"),
        "shots": parse_shot_counts(selection.shots),
        "classes": [parse_classes(name) for name in split_names(selection.classes)],
        "sampling": [check_sampling(name) for name in split_names(selection.sampling)],
        "precision": precisions,
    }

    def is_selected(path: str, config: RunConfig | None, settings: EvalSettings) -> bool:
        if config is None:
            parts = RunConfig.parse_path(path)
            return all(parts[name] in (chosen[name] or parts[name]) for name in ("classes", "dataset", "method"))
        weights = itertools.product(backbones or (config.backbone,), tags or (config.pretrained,))
        named = itertools.starmap(canonical_name, weights)
        if (backbones or tags) and (config.backbone, config.pretrained) not in named:
            return False
        # A result counts for all values of what it does not depend on.
        unread = {"shots", "sampling", "seed"} - {*settings.sample_fields(config)}
        compared = [field for field in chosen if field not in unread]
        return all(not chosen[field] or getattr(config, field) in chosen[field] for field in compared)

    return is_selected


def find_run(run: Path, session: Session) -> Run:
    """Find a run by its folder, its path below the results, a unique prefix of its hash, or its address at `hf://`."""
    # A path has one slash where the address has two.
    if run.parts[:1] == ("hf:",):
        from runner.hub import fetch_run

        return fetch_run(f"hf://{'/'.join(run.parts[1:])}", session)
    results = session.runtime.results
    if session.runtime.results_url and "/" in str(run) and not run.is_absolute():
        session.remote.pull(run.as_posix())
    folder, below = run.expanduser(), results / run
    if not folder.exists() and HASH_PREFIX.fullmatch(str(run)):
        session.remote.pull()
        folders = [each.path for each in find_runs(results)]
        return select_run([path for path in folders if path.name.rpartition("-")[2].startswith(str(run))], session)
    return session.locate(below if below.exists() and not folder.exists() else folder)


def find_selected_run(selection: SelectionFlags, session: Session, *, best: bool = False) -> Run:
    """Find the only run that the flags select, or the best of several; the rest is as in `find_run`."""
    session.remote.pull()
    broken: dict[str, UserError] = {}
    runs = list_selected_runs(session.runtime.results, broken.__setitem__, run_filter(selection))
    if broken:
        # It may be the run that is meant.
        raise next(iter(broken.values()))
    if best and len(runs) > 1:
        return best_run([config for folder, config in runs if folder.train_file.exists()], session)
    folders = [folder.path for folder, _ in runs]
    return select_run(folders, session, "name one, or take the best on validation images with --best")


def best_run(configs: Sequence[RunConfig], session: Session) -> Run:
    """Return the run with the highest validation accuracy, after evaluating the runs for which it is missing.

    For `dev-base` it is the harmonic mean over both halves. Raises UsageError for runs that it cannot compare.
    """
    from cluster.trial import validation_targets
    from runner.evaluate import evaluate_run
    from runner.run_state import score

    trained_on = {(config.dataset, config.classes) for config in configs}
    if len(trained_on) != 1:
        listed = join_first([f"{classes} classes of {dataset}" for dataset, classes in sorted(trained_on)], 5)
        raise UsageError(
            f"--best compares finished runs on the same classes, not {listed or 'none'}: add --datasets or --classes"
        )
    [(dataset, classes)] = trained_on
    if "val" not in resolve_dataset(dataset, session.runtime.data).counts:
        raise UsageError(f"--best: {dataset} has no validation images: name a run")
    targets = [Target.parse_unchecked(target) for target in validation_targets(dataset, classes)]
    runs = [session.get_run(config) for config in configs]
    scores = {run: score([evaluate_run(run, target).accuracy for target in targets]) for run in runs}
    best = max(scores, key=lambda run: scores[run])
    note(f"best of {plural(len(scores), 'run')} on validation images, {scores[best]:.2f} %: {best.path}")
    return best


def select_run(folders: Sequence[Path], session: Session, remedy: str = "name one") -> Run:
    """Return the only run of `folders`. Raises UsageError, which lists them with a `remedy`, for none or several."""
    runtime = session.runtime
    if len(folders) != 1:
        names = [path.relative_to(runtime.results).as_posix() for path in folders]
        listed = f"{plural(len(names), 'run')} fit: {join_first(names, 5)}; {remedy}" if names else "no run fits"
        raise UsageError(f"{listed}; see `procap ls runs --results {quote(runtime.results_url or runtime.results)}`")
    return find_run(folders[0], session)
