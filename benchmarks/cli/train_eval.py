"""`procap train` and `procap eval`: several runs in one command, of which one may fail without stopping the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli.data_few_shot import store_file
from benchmarks.cli.flags import (
    EngineFlags,
    ModeFlags,
    OutputFlags,
    RecipeFlags,
    RuntimeFlags,
    SelectionFlags,
    command_line,
)
from benchmarks.cli.plan import PlannedRun, data_states, describe, plan, weights_states
from benchmarks.cli.selection import configs, targets_of, workplace
from benchmarks.console.output import SOME_FAILED, columns, note, show, show_json, speaks
from benchmarks.console.packing import ensure_packed
from procap.errors import UsageError, UserError
from runner.config import RunConfig, RuntimeConfig, Target
from runner.distributed.ranks import ranks_from_environment
from runner.environment import library_defaults, own_device, resolve_device
from runner.remote_results import RemoteResults
from runner.results import EvalResult, RunFolder, TrainResult
from runner.stop_signals import Interrupted
from runner.tracking.background import exporter_for
from shards.errors import DataError
from shards.home import features_root

if TYPE_CHECKING:
    from runner.distributed.collectives import ProcessGroup


class Failures:
    """What went wrong in a command of several runs; the runs after it are still done."""

    def __init__(self, runs: int, *, verbose: bool, group: ProcessGroup | None = None) -> None:
        """Of a group one process that fails ends them all: the others wait for it in the middle of a run."""
        self.alone = runs == 1 or (group is not None and group.size > 1)
        self.verbose = verbose
        self.found: dict[str, str] = {}

    def attempt(self, what: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, None when it failed. A command of one run fails as that run; signals stop every one."""
        try:
            return work()
        except Interrupted:
            raise
        except Exception as error:
            if self.alone:
                raise
            known = isinstance(error, UserError | DataError | OSError)
            text = " ".join(str(error).split())
            self.found[what] = text if known else f"internal error: {type(error).__name__}: {text}"
            note(f"procap: failed: {what}: {self.found[what]}")
            if self.verbose:
                traceback.print_exc()
            return None

    def exit_code(self, done: int) -> int:
        """0 when nothing failed, 3 when something was `done` all the same, else 1; says again what failed and why."""
        if not self.found:
            return 0
        note(f"procap: {done} done, {len(self.found)} failed:")
        for what, why in self.found.items():
            note(f"  {what}: {why}")
        return SOME_FAILED if done else 1


def train(
    selection: SelectionFlags,
    training: RecipeFlags,
    place: RuntimeFlags,
    parallel: EngineFlags,
    doing: ModeFlags,
    output: OutputFlags,
) -> int:
    """Train every selected run; see `procap train --help`."""
    library_defaults()
    at = workplace(place, parallel=parallel)
    if doing.dry_run:
        chosen = _chosen(selection, training, at)
        return show_plan(chosen, at, lambda config: [], output, force=doing.force) if speaks() else 0
    with group_at(at) as (group, at):
        # Only who has met can be told what is wrong on one host alone, such as its data.
        chosen = _chosen(selection, training, at)
        if training.few_shot_samples:
            ensure_packed([chosen[0].dataset], at.data)
            store_file(training.few_shot_samples, chosen[0].dataset, at.data)
        failures = Failures(len(chosen), verbose=output.verbose, group=group)
        done = train_all(chosen, at, failures, force=doing.force, group=group)
        exporter_for(at).flush()
    if done:
        rows = [_trained_row(config, result) for config, result in done.items()]
        show(columns(("run", "loss", "steps", "seconds", "images/s"), rows))
        note(f"next: procap eval {command_line(selection, training, place)}")
    code = failures.exit_code(len(done))
    if output.json:
        runs = [{"run": config.path, **_train_json(result)} for config, result in done.items()]
        show_json({"results": str(at.results), "trained": runs, "failed": failures.found})
    return code


def _chosen(selection: SelectionFlags, training: RecipeFlags, at: RuntimeConfig) -> list[RunConfig]:
    """Every run that the flags describe, and that the engine can do."""
    chosen = configs(selection, training, at.data)
    if at.engine != "ddp":
        from runner.engines import engine_settings

        for config in chosen:
            engine_settings(config, at, ranks_from_environment())
    return chosen


def train_all(
    chosen: Sequence[RunConfig],
    at: RuntimeConfig,
    failures: Failures,
    *,
    force: bool = False,
    first: int = 1,
    of: int = 0,
    group: ProcessGroup | None = None,
) -> dict[RunConfig, TrainResult]:
    """Pack what is missing, then train `chosen` in their order; those that failed are left out.

    They are announced as number `first` and so on `of` so many (default: of themselves).
    """
    from runner.train import train as train_run

    done: dict[RunConfig, TrainResult] = {}
    for number, config in enumerate(chosen, first):
        place = f"[{number}/{of or len(chosen)}]"
        folder = RunFolder(at.results / config.path)
        was_finished = folder.train_file.exists() and not force

        def work(config: RunConfig = config) -> TrainResult:
            ensure_packed([config.dataset], at.data)
            return train_run(config, at, force=force, group=group)

        if not was_finished:
            note(f"{place} {'training' if config.recipe.epochs else 'preparing'} {config.path}")
        result = failures.attempt(config.path, work)
        if result is None:
            continue
        done[config] = result
        if was_finished:
            note(f"{place} already finished: {config.path}")
    return done


def evaluate(
    runs: Sequence[Path],
    targets: str,
    limit: int | None,
    selection: SelectionFlags,
    training: RecipeFlags,
    place: RuntimeFlags,
    doing: ModeFlags,
    output: OutputFlags,
    *,
    cached: bool = True,
) -> int:
    """Evaluate run folders or selected runs on targets; see `procap eval --help`."""
    library_defaults()
    at = workplace(place, limit, features_root() if cached else None)
    if runs and (selection != SelectionFlags() or training != RecipeFlags()):
        raise UsageError("give run folders, or flags such as --methods and --datasets that name runs, not both")

    def find() -> list[tuple[RunConfig, RuntimeConfig]]:
        return [_run_of(run, at) for run in runs] or [(run, at) for run in configs(selection, training, at.data)]

    if doing.dry_run:
        if not speaks():
            return 0
        found = find()
        planned = [(config, targets_of(config, targets, at.data)) for config, _ in found]
        by_run = dict(planned)
        return show_plan(
            [config for config, _ in planned], at, by_run.__getitem__, output, places=[p for _, p in found]
        )
    flags = "with the flags it was planned with" if runs else command_line(selection, training, place)
    with group_at(at) as (group, at):
        found = _shared(find, group, at) if runs else find()
        jobs = [(config, here, target) for config, here in found for target in targets_of(config, targets, at.data)]
        failures = Failures(len(found), verbose=output.verbose, group=group)
        done = evaluate_all(jobs, failures, f"procap train {flags}", force=doing.force, group=group)
        exporter_for(at).flush()
    if done:
        show(
            columns(("run", "target", "correct", "total", "accuracy", "images/s"), [_eval_row(*item) for item in done])
        )
        if any(result.limited for _, _, result in done):
            note("† limited: only the first images of the target were evaluated")
        if any(result.features != "computed" for _, _, result in done):
            note("no images/s where image features came from the cache: --force computes and times them")
    code = failures.exit_code(len(done))
    if output.json:
        entries = [{"run": config.path, **_eval_json(result)} for config, _, result in done]
        show_json({"evaluated": entries, "failed": failures.found})
    return code


def evaluate_all(
    jobs: Iterable[tuple[RunConfig, RuntimeConfig, Target]],
    failures: Failures,
    trained_by: str,
    *,
    force: bool = False,
    group: ProcessGroup | None = None,
) -> list[tuple[RunConfig, Target, EvalResult]]:
    """Evaluate finished runs; a run is loaded once for all its targets that are still to do.

    trained_by: the command that trains them, for the answer to one that was not trained.
    """
    from runner.evaluate import TrainedRun, load_trained
    from runner.evaluate import evaluate as evaluate_run

    done: list[tuple[RunConfig, Target, EvalResult]] = []
    loaded: TrainedRun | None = None
    for config, at, target in jobs:

        def work(config: RunConfig = config, at: RuntimeConfig = at, target: Target = target) -> EvalResult:
            nonlocal loaded
            todo = True
            if group is None or group.ranks.first:
                folder = RunFolder(at.results / config.path)
                RemoteResults.of(at).pull_run(config.path, weights=False)
                _refuse_untrained(folder, trained_by)
                known = None if force else folder.evaluation(target)
                todo = known is None or known.limit not in (None, at.limit)
            todo = group.broadcast_object(todo) if group else todo
            ensure_packed([target.dataset], at.data)
            if todo and (loaded is None or loaded.config != config):
                loaded = load_trained(config, at, group)
            return evaluate_run(config, target, at, force=force, trained=loaded if todo else None, group=group)

        result = failures.attempt(f"{config.path} on {target}", work)
        if result is not None:
            note(f"  {target}: {result.accuracy:.2f} % ({result.correct}/{result.total}) {config.method}")
            done.append((config, target, result))
    return done


@contextmanager
def group_at(at: RuntimeConfig) -> Iterator[tuple[ProcessGroup, RuntimeConfig]]:
    """The processes that a launcher started, this one with its own device; what they train is trained inside."""
    from runner.distributed.process_group import init_process_group

    ranks = ranks_from_environment()
    device = own_device(resolve_device(at.device), ranks)
    with init_process_group(ranks, device, at.timeout) as group:
        yield group, replace(at, device=str(device))


def show_plan(
    chosen: Sequence[RunConfig],
    at: RuntimeConfig,
    targets: Callable[[RunConfig], list[Target]],
    output: OutputFlags,
    *,
    force: bool = False,
    places: Sequence[RuntimeConfig] = (),
) -> int:
    """Print what would be done for `chosen` (below `places`, one each, where they differ from `at`)."""
    runs, data, weights = _planned(chosen, at, targets, force, places)
    show(describe(runs, data, weights))
    if output.json:
        show_json({"data": data, "weights": weights, "runs": [run.to_dict() for run in runs]})
    return 0


def plan_of(
    chosen: Sequence[RunConfig], at: RuntimeConfig, targets: Callable[[RunConfig], list[Target]], *, force: bool = False
) -> dict[str, Any]:
    """What `show_plan` prints, as JSON."""
    runs, data, weights = _planned(chosen, at, targets, force)
    return {"data": data, "weights": weights, "runs": [run.to_dict() for run in runs]}


def _planned(
    chosen: Sequence[RunConfig],
    at: RuntimeConfig,
    targets: Callable[[RunConfig], list[Target]],
    force: bool,
    places: Sequence[RuntimeConfig] = (),
) -> tuple[list[PlannedRun], dict[str, str], dict[str, str]]:
    """The runs, and the state of their data sets and weights."""
    RemoteResults.of(at).pull_all()
    pairs = zip(chosen, places or [at] * len(chosen), strict=True)
    runs = [planned for config, here in pairs for planned in plan([config], here, targets, force=force)]
    used = [run.config.dataset for run in runs if run.state != "finished"]
    used += [planned.target.dataset for run in runs for planned in run.targets]
    return runs, data_states(used, at.data), weights_states(chosen)


def _refuse_untrained(folder: RunFolder, trained_by: str) -> None:
    if folder.train_file.exists():
        return
    state = "has not finished" if folder.progress_file.exists() else "was not trained"
    raise UserError(f"{folder.path} {state}; train it first: {trained_by}")


def _run_of(run: Path, at: RuntimeConfig) -> tuple[RunConfig, RuntimeConfig]:
    """The configuration of a run folder, given as a path or as its name below the results, and the place it lies in."""
    if at.store and not run.is_absolute():
        RemoteResults.of(at).pull_run(run.as_posix())
    folder = next((f for f in (run.expanduser(), at.results / run) if (f / "config.json").exists()), None)
    if folder is None:
        hint = "list the runs with `procap ls runs --results FOLDER`"
        raise UsageError(f"{run} is not the folder of a run (no config.json in it); {hint}")
    config = RunFolder(folder).config()
    assert config is not None
    folder = folder.resolve()
    if not folder.as_posix().endswith(f"/{config.path}"):
        raise UsageError(f"{run} was moved: its config.json is of {config.path}, put it back there below the results")
    results = folder.parents[len(Path(config.path).parts) - 1]
    return config, replace(at, results=results, store=at.store if results == at.results.resolve() else None)


def _shared(
    find: Callable[[], list[tuple[RunConfig, RuntimeConfig]]], group: ProcessGroup, at: RuntimeConfig
) -> list[tuple[RunConfig, RuntimeConfig]]:
    """What the first process of the group finds, which alone needs the folder of the results."""
    found = find() if group.ranks.first else []
    plain = group.broadcast_object([(config.model_dump(mode="json"), str(here.results)) for config, here in found])
    if group.ranks.first:
        return found
    return [(RunConfig.model_validate(config), replace(at, results=Path(results))) for config, results in plain]


def _trained_row(config: RunConfig, result: TrainResult) -> tuple[object, ...]:
    loss = f"{sum(result.epochs[-1].terms.values()):.4f}" if result.epochs else "-"
    rate = "-" if result.images_per_second is None else f"{result.images_per_second:.1f}"
    return (config.path, loss, result.steps, f"{result.seconds:.1f}", rate)


def _train_json(result: TrainResult) -> dict[str, Any]:
    timed = {"seconds": result.seconds, "images_per_second": result.images_per_second}
    kept = ("config_hash", "steps", "images", "trainable_parameters", "checkpoint_sha256")
    return {name: getattr(result, name) for name in kept} | timed


def _eval_row(config: RunConfig, target: Target, result: EvalResult) -> tuple[object, ...]:
    mark = " †" if result.limited else ""
    rate = "-" if result.images_per_second is None else f"{result.images_per_second:.1f}"
    return (config.path, str(target), result.correct, result.total, f"{result.accuracy:.2f}{mark}", rate)


def _eval_json(result: EvalResult) -> dict[str, Any]:
    timed = {name: getattr(result, name) for name in ("images_per_second", "images_per_second_model")}
    kept = ("target", "correct", "total", "limit", "accuracy", "features")
    return {name: getattr(result, name) for name in kept} | timed
