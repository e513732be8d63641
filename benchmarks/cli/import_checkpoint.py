"""`procap import`: import checkpoints of public trainers as finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import flags
from benchmarks.cli.selection import plan_selected_runs, runtime_config
from benchmarks.cli.several_runs import Failures
from benchmarks.console.output import columns, note, note_failures, show, show_json
from benchmarks.console.packing_progress import pack_missing_with_progress
from procap.errors import UsageError
from runner.session import Session


@flags.command(
    "procap import model.pth.tar-5 --method maple --datasets caltech101 --seeds 1 --backbone ViT-B/16",
    "procap import 'out/{dataset}/seed{seed}/VLPromptLearner/model.pth.tar-20' --method promptsrc "
    "--datasets dtd,eurosat --seeds 1,2,3 --backbone ViT-B/16",
    "procap import FILE --method maple --datasets imagenet --classes all --task cross-dataset --backbone ViT-B/16",
)
def import_checkpoint(
    selection: flags.SelectionFlags,
    recipe_flags: flags.RecipeFlags,
    runtime_flags: flags.StorageFlags,
    mode: flags.ModeFlags,
    file: Annotated[str, typer.Argument(metavar="FILE", help="checkpoint of Dassl; {dataset}, {seed}: those of a run")],
    task: Annotated[
        str, flags.flag("NAME", "task of the published recipe [default: base-to-novel, few-shot on all classes]")
    ] = "",
) -> int:
    """Import checkpoints of public trainers as finished runs.

    The learned tensors are read; no code in the file is executed. Recipe and options are those published for the task,
    unless flags change them; the file's shapes must fit them. Evaluate the runs with `procap eval`; results are marked
    as imported.
    """
    runtime = runtime_config(runtime_flags)
    runs = plan_selected_runs(selection, recipe_flags, runtime.data, task or None)
    files = {
        config: Path(file.replace("{dataset}", config.dataset).replace("{seed}", str(config.seed))).expanduser()
        for config in runs
    }
    if len(set(files.values())) < len(runs):
        raise UsageError(
            f"{len(runs)} runs are chosen and a file holds one run: write {{dataset}} and {{seed}} into its path"
        )
    if mode.dry_run:
        show(columns(("file", "run"), [(str(path), config.path) for config, path in files.items()]))
        show_json(
            {"results": runtime.shown_results, "files": {config.path: str(path) for config, path in files.items()}}
        )
        return 0
    # This imports torch, which a wrong flag need not wait for.
    from runner.public_checkpoints import import_run

    failures, done = Failures(len(runs)), {}
    session = Session(runtime)
    for config, path in files.items():
        with failures.collect(config.path):
            pack_missing_with_progress([config.dataset], runtime.data)
            done[config] = import_run(session.get_run(config), path, force=mode.force)
            note(f"imported {path} as {config.path}")
    session.exporter.flush()
    code = note_failures(len(done), failures.reasons)
    imported = [
        {"run": config.path, **result.model_dump(include={"imported", "trainable_parameters", "checkpoint_sha256"})}
        for config, result in done.items()
    ]
    show_json({"results": runtime.shown_results, "imported": imported, "failed": failures.reasons})
    return code
