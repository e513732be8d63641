"""Print what a command would do: its runs, which of them are done, and the state of their data and weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import OutputFlags
from benchmarks.console.output import columns, plural, show, show_json
from benchmarks.suites.planning import count_images, read_state
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.remote_results import RemoteResults
from shards.errors import DataError, DataUsageError
from shards.manifest import read_manifest
from shards.resolve import is_packed, resolve_dataset


def show_plan(
    work: Sequence[tuple[RunConfig, RuntimeConfig, Sequence[Target]]],
    output: OutputFlags,
    *,
    force: bool = False,
    forecast: Sequence[str] = (),
) -> None:
    """Print what is left of runs and their evaluations. forecast: lines about the time that this will take."""
    for runtime in dict.fromkeys(runtime for _, runtime, _ in work):
        RemoteResults.of(runtime).pull_all()
    runs: list[dict[str, Any]] = []
    used: dict[str, None] = {}
    for config, runtime, targets in work:
        state, train_images = read_state(config, targets, runtime, force=force), 0
        if state.status != "finished":
            used[config.dataset] = None
            _, _, images = count_images(config.dataset, config.classes, "train", runtime.data, most=config.shots)
            train_images = round(images * config.recipe.passes(round(images)) * (1 - state.trained))
        planned = []
        for target in targets:
            used[target.dataset] = None
            test_images = 0
            # A finished evaluation needs no data: the data set may have been deleted since.
            if target in state.open:
                _, _, images = count_images(target.dataset, target.classes, target.split, runtime.data)
                test_images = min(round(images), runtime.limit or round(images))
            planned.append({"target": str(target), "done": target not in state.open, "images": test_images})
        runs.append({"run": config.path, "state": state.status, "train_images": train_images, "targets": planned})
    data = data_states(used, work[0][1].data) if work else {}
    weights = weights_states(config for config, _, _ in work)

    show(columns(("data set", "shards"), list(data.items())) + "\n")
    for name, place in weights.items():
        show(f"weights of {name}: {place}")
    rows = []
    for run in runs:
        names = " ".join(f"{one['target']}{'=done' if one['done'] else ''}" for one in run["targets"])
        test_images = sum(one["images"] for one in run["targets"])
        rows.append((run["state"], run["run"], run["train_images"], test_images, names or "-"))
    show("\n" + columns(("state", "run", "train images", "test images", "targets"), rows))
    show(
        f"\n{plural(len(rows), 'run')}, {sum(row[0] != 'finished' for row in rows)} to train; "
        f"about {sum(row[2] for row in rows):,} images to train on, "
        f"{sum(row[3] for row in rows):,} to evaluate. Nothing was written."
    )
    if forecast:
        show("\n" + "\n".join(forecast))
    if output.json:
        show_json({"data": data, "weights": weights, "runs": runs})


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
        except DataUsageError:
            states[name] = "missing"
        except DataError as error:
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
