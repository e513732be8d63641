"""Print what a command would do: its runs, which of them are done, and the state of their data and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.cli.flags import OutputFlags
from benchmarks.console.output import columns, plural, show, show_json
from benchmarks.results.frame import describe_settings, title_method, title_variants
from benchmarks.suites.checks import count_training_images, note_small_classes
from benchmarks.suites.planning import RunState, count_images, read_state
from cluster.run import RunSpec
from procap.errors import UsageError, UserError
from procap.methods import METHODS
from procap.recipe import format_value
from runner.config import RunConfig, RuntimeConfig, Target, changed_settings
from runner.remote_results import RemoteResults
from runner.run_folders import OtherContent, RunFolder
from shards.manifest import read_manifest
from shards.resolve import is_packed, resolve_dataset


def show_checked_plan(
    check: Callable[[], None],
    specs: Sequence[RunSpec],
    runtime: RuntimeConfig,
    output: OutputFlags,
    *,
    force: bool = False,
    evaluate_again: bool = False,
    forecast: Sequence[str] = (),
    tasks: Mapping[str, str | None] | None = None,
) -> None:
    """Print what is left of runs, then raise the error of `check`, which stops the command; a usage error comes alone.

    force: repeat finished runs. evaluate_again: repeat only evaluations.
    forecast: lines about the time that this will take. tasks: of runs whose published options are not the usual ones.
    """
    stops: UserError | None = None
    try:
        check()
    except UserError as error:
        if error.exit_code == UsageError.exit_code:
            raise
        stops = error
    RemoteResults.from_runtime(runtime).pull_all()
    configs = [spec.config for spec in specs]
    runs: list[dict[str, Any]] = []
    used: dict[str, None] = {}
    for config, spec in zip(configs, specs, strict=True):
        targets, epoch_images, passes = [Target.parse_unchecked(target) for target in spec.targets], 0, 0.0
        try:
            state = read_state(config, targets, runtime, force=force)
        except OtherContent:
            state = RunState("other data", 1.0, [*targets])
        if state.status == "finished" and config.method not in METHODS and not evaluate_again:
            training = RunFolder(runtime.results / config.path).train()
            if training and training.changed_code(config):
                state = state._replace(status="other code")
        if evaluate_again:
            state = state._replace(open=[*targets])
        if state.status != "finished":
            used[config.dataset] = None
            epoch_images = count_training_images(config, runtime.data)
            passes = config.recipe.passes(epoch_images) * (1 - state.trained)
        planned = []
        for target in targets:
            used[target.dataset] = None
            test_images = 0
            # A finished evaluation needs no data: the data set may have been deleted since.
            if target in state.open and not state.status.startswith("other"):
                _, _, images = count_images(target.dataset, target.classes, target.split, runtime.data)
                test_images = min(round(images), runtime.limit or round(images))
            planned.append({"target": str(target), "done": target not in state.open, "images": test_images})
        plan = {"run": config.path, "state": state.status, "epochs": passes, "images": epoch_images if passes else 0}
        runs.append({**plan, "train_images": round(epoch_images * passes), "targets": planned})
    data, weights = data_states(used, runtime.data), weights_states(configs)
    note_small_classes((config for config, run in zip(configs, runs, strict=True) if run["epochs"]), runtime.data)
    if data:
        show(columns(("data set", "shards"), list(data.items())) + "\n")
    for name, place in weights.items():
        show(f"weights of {name}: {place}")
    settings = [describe_settings(config) for config in configs]
    titles = title_variants(SimpleNamespace(method=[config.method for config in configs], settings=settings))
    titles = [
        _name_options(title, config, (tasks or {}).get(config.path))
        for title, config in zip(titles, configs, strict=True)
    ]
    rows: list[tuple[Any, ...]] = []
    for run, title in zip(runs, titles, strict=True):
        names = " ".join(f"{one['target']}{'=done' if one['done'] else ''}" for one in run["targets"])
        test_images = sum(one["images"] for one in run["targets"])
        epochs = float(f"{run['epochs']:.3g}")
        rows.append((run["state"], title, f"{epochs:g}", run["images"], test_images, run["run"], names or "-"))
    show("\n" + columns(("state", "variant", "epochs", "images", "test images", "run", "targets"), rows))
    show(
        f"\n{plural(len(rows), 'run')}, {sum(bool(run['train_images']) for run in runs)} to train; "
        f"about {sum(run['train_images'] for run in runs):,} images to train on in all epochs, "
        f"{sum(row[4] for row in rows):,} to evaluate. Nothing was written."
    )
    # Runs of other data or code are refused.
    if forecast and not any(run["state"].startswith("other") for run in runs):
        show("\n" + "\n".join(forecast))
    if output.json:
        show_json({"data": data, "weights": weights, "runs": runs})
    if stops:
        raise stops


def _name_options(title: str, config: RunConfig, task: str | None) -> str:
    """Add the options that differ from those published for a task to the title of a method without other variants."""
    changed = [f"{name} {format_value(value)}" for name, value in changed_settings(config, task)[0].items()]
    return f"{title} ({', '.join(changed)})" if changed and title == title_method(config.method) else title


def data_states(names: Iterable[str], data_root: Path) -> dict[str, str]:
    """Return the number of shards of each data set, or why there are none."""
    states = {}
    for name in names:
        try:
            if is_packed(data_root, name):
                splits = read_manifest(data_root / name, name).splits.values()
                states[name] = plural(sum(len(split.shards) for split in splits), "shard")
            else:
                states[name] = "missing" if resolve_dataset(name, data_root).source == "folder" else "to be packed"
        except UsageError:
            states[name] = "missing"
        except UserError as error:
            states[name] = f"broken: {error}"
    return states


def weights_states(configs: Iterable[RunConfig]) -> dict[str, str]:
    """Return the weights file of each backbone, or that it is missing on this machine."""
    from procap.weights.loading import weights_file

    states = {}
    for backbone, pretrained in dict.fromkeys((config.backbone, config.pretrained) for config in configs):
        name = f"{backbone} {pretrained}" if pretrained else backbone
        try:
            file = weights_file(backbone, pretrained)
            states[name] = str(file) if file else "drawn at random" if pretrained == "random" else "in the program"
        except UsageError:
            raise
        except UserError as error:
            states[name] = f"missing: {error}"
    return states
