"""`procap eval`: evaluate trained runs on any target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from benchmarks.cli import flags
from benchmarks.cli.selection import default_targets, find_run, plan_selected_runs, runtime_config
from benchmarks.cli.several_runs import Failures, process_group, show_plan
from benchmarks.console.output import columns, is_first_rank, note, note_failures, quote, show, show_json
from benchmarks.console.packing_progress import pack_missing_with_progress
from benchmarks.console.parse import split_names
from benchmarks.console.preconditions import check_weights_of
from benchmarks.results.detection import detect_unknown
from benchmarks.results.frame import OF_IMAGES
from procap.errors import UsageError
from runner.config import RunConfig, Target
from runner.planning import known_target
from runner.results import EvalResult
from runner.run_state import RunSpec, RunState, read_states
from runner.session import Run, Session
from shards.image_selection import select_labels

Evaluated = tuple[RunConfig, Target, EvalResult]


@flags.command(
    "procap eval results/base/shapes/maple/mini/16shot/seed1-3fa29c10",
    "procap eval --methods maple --datasets shapes --targets shapes-sketch,digits:all",
    "procap eval --methods zeroshot --datasets tiles --limit 50",
)
def evaluate(
    selection: flags.SelectionFlags,
    recipe_flags: flags.RecipeFlags,
    evaluation: flags.EvalFlags,
    runtime_flags: flags.RuntimeFlags,
    mode: flags.ModeFlags,
    folders: Annotated[list[Path] | None, flags.run_argument("folders, instead of flags")] = None,
    targets: Annotated[str, flags.flag("SET[:CLASSES[:SPLIT]]", "comma list [default: base and novel classes]")] = "",
    unknown: Annotated[str, flags.flag("SET[,SET]", "tell images of the run's classes from those of other sets")] = "",
) -> int:
    """Evaluate trained runs on any target. Results under different evaluation flags are kept in different files."""
    runtime = runtime_config(runtime_flags, evaluation=evaluation)
    planning, unknown_sets = Session(runtime), [Target.parse(part, runtime.data) for part in split_names(unknown)]
    if folders and (selection != flags.SelectionFlags() or recipe_flags != flags.RecipeFlags()):
        reason = "give run folders, or flags such as --methods and --datasets that name runs, not both"
        raise UsageError(f"{reason}; lists have commas, as in --methods coop,maple")

    def find_specs() -> tuple[list[RunSpec], Path, str | None]:
        """Find the runs with their targets, the results folder that they lie in, and its URL."""
        named = [Target.parse(part, runtime.data) for part in split_names(targets)]
        if folders:
            located = [find_run(folder, planning) for folder in folders]
            if len({run.session.runtime.results.resolve() for run in located}) > 1:
                raise UsageError("these runs lie in several results folders: evaluate those of each by themselves")
            configs, found_in = [run.config for run in located], located[0].session.runtime
        else:
            configs, found_in = plan_selected_runs(selection, recipe_flags, runtime.data), runtime
            if not mode.dry_run:
                check_weights_of(configs, runtime)
        specs = []
        for config in configs:
            # Refuse impossible settings before any run is evaluated.
            runtime.evaluation.for_run(config)
            tests = named or default_targets(config, runtime.data)
            for target in unknown_sets:
                tests = [*dict.fromkeys([*named, known_target(config)])]
                trained, asked = ({*select_labels(range(8), half)} for half in (config.classes, target.classes))
                if target.dataset == config.dataset and trained & asked:
                    raise UsageError(f"--unknown {target}: {config.path} was trained on classes of it")
            specs.append(RunSpec(config=config, targets=tuple(map(str, tests))))
        return specs, found_in.results, found_in.results_url

    if mode.dry_run:
        if not is_first_rank():
            return 0
        runs, results, url = find_specs()
        states = read_states(Session(replace(runtime, results=results, results_url=url)), runs)
        if mode.force:
            trained = (run for run in runs if states[run.path].is_trained)
            states |= {run.path: RunState("repeat", run.targets) for run in trained}
        return show_plan(runs, states)
    with process_group(runtime, lambda _: find_specs(), on_first=bool(folders)) as (session, (runs, results, url)):
        session = Session(replace(session.runtime, results=results, results_url=url), session.group)
        failures = Failures(len(runs), group=session.group)
        done, detected = _evaluate_all(runs, unknown_sets, session, failures, force=mode.force)
        session.exporter.flush(create=False)
    code = _show_evaluations(done, detected, failures)
    if code == 0 and done:
        shown = session.runtime.shown_results
        where = f" --results {quote(shown)}" if shown != "results" else ""
        note(f"next: procap table{where}; procap report{where}")
    return code


def _show_evaluations(done: Sequence[Evaluated], detected: Sequence[Mapping[str, Any]], failures: Failures) -> int:
    rows: list[tuple[object, ...]] = []
    for config, target, result in done:
        accuracy, fit = f"{result.accuracy:.2f}", result.calibration
        accuracy += " †" * result.limited + " ‡" * config.chosen_on_test
        probabilities = (f"{fit.nll:.3f}", f"{fit.equal_width.ece:.2f}") if fit else ("-", "-")
        rate = "-" if result.images_per_second is None else f"{result.images_per_second:.1f}"
        name = result.settings.name or "default"
        name += f" ({result.temperature:g})" if result.temperature else ""
        rows.append((config.path, str(target), name, result.correct, result.total, accuracy, *probabilities, rate))
    if rows:
        names = ("run", "target", "settings", "correct", "total", "accuracy", "NLL", "ECE", "images/s")
        show(columns(names, rows))
    if any(result.limited for _, _, result in done) or any(row["limited"] for row in detected):
        note("† limited: only the first images of the target were evaluated")
    for target in dict.fromkeys(target for _, target, result in done if result.num_classes == 1):
        note(f"{target} has one class, so that every image counts as right")
    if detected:
        # The last value, whether scores are limited, is the mark of the others.
        cells = [
            [f"{cell:.2f}{' †' * row['limited']}" if isinstance(cell, float) else cell for cell in row.values()][:-1]
            for row in detected
        ]
        show("\n" + columns(("run", "known", "unknown", "score", "AUROC", "FPR95"), cells))
    code = note_failures(len(done), failures.reasons)
    evaluated = [
        {"run": config.path, "accuracy": result.accuracy, "macro_accuracy": result.macro_accuracy}
        | result.model_dump(exclude={"per_class", "environment", *OF_IMAGES})
        for config, _, result in done
    ]
    show_json({"evaluated": evaluated, "unknown": detected, "failed": failures.reasons})
    return code


def _evaluate_all(
    runs: Iterable[RunSpec], unknown: Sequence[Target], session: Session, failures: Failures, *, force: bool
) -> tuple[list[Evaluated], list[dict[str, Any]]]:
    """Evaluate finished runs on all targets, and tell images of their classes from those of the sets `unknown`."""
    from runner.evaluate import evaluate_run, score_images

    done: list[Evaluated] = []
    detected: list[dict[str, Any]] = []
    for spec in runs:
        # The object of a run keeps what it has loaded for all targets.
        run, config = session.get_run(spec.config), spec.config
        for target in map(Target.parse_unchecked, spec.targets):
            with failures.collect(f"{config.path} on {target}"):
                session.remote.pull(config.path)
                if not config.recipe.epochs:
                    prepare_untrained(run, force=force)
                pack_missing_with_progress([target.dataset], session.runtime.data)
                result = evaluate_run(run, target, force=force)
                name = f"{config.method}, seed {config.seed}"
                note(f"  {target}: {result.accuracy:.2f} % ({result.correct}/{result.total}) {name}")
                done.append((config, target, result))
        if unknown:
            with failures.collect(f"{config.path} on unknown images"):
                pack_missing_with_progress([target.dataset for target in unknown], session.runtime.data)
                known = known_target(config)
                scores = [score_images(run, target, force=force) for target in (known, *unknown)]
                for name, each in detect_unknown(known, scores, run.eval_settings).items():
                    row = {"run": config.path, "known": str(known), "unknown": name, "score": each.unknown.score}
                    detected.append(row | {"auroc": each.auroc, "fpr95": each.fpr95, "limited": each.limited})
    return done, detected


def prepare_untrained(run: Run, *, force: bool) -> None:
    """Write the run of a method without training, such as zero-shot CLIP, unless it exists.

    force: also if it was made with different content of its data set.
    """
    from runner.train import train_run

    def is_missing() -> bool:
        status = read_states(run.session, [RunSpec(config=run.config)])[run.path].status
        return status in ("new", "unfinished", "failed", "broken") or (force and status == "other data")

    if run.session.group.call_on_first(is_missing):
        pack_missing_with_progress([run.config.dataset], run.session.runtime.data)
        train_run(run, force=force)
