"""`procap export`: export trained runs for public code and ONNX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.cli import flags
from benchmarks.cli.selection import find_run, runtime_config
from benchmarks.cli.several_runs import Failures
from benchmarks.console.output import note, note_failures, show, show_json
from runner.session import Session
from shards.files import check_writable


@flags.command(
    "procap export results/base/shapes/maple/mini/16shot/seed1-3fa29c10",
    "procap export base/shapes/maple/mini/16shot/seed1-3fa29c10 --format onnx --out models",
    "procap export base/dtd/maple/ViT-B-16/16shot/seed1-0c41d2aa --format ledger --out docs/results/ledger",
)
def export(
    folders: Annotated[
        list[Path],
        flags.run_argument("run folders, see `procap ls runs`"),
    ],
    format: Annotated[Literal["dassl", "safetensors", "onnx", "ledger"], typer.Option(help="file format")] = "dassl",
    out: Annotated[Path, flags.flag("FOLDER", "folder of the files, each below the path of its run")] = Path("export"),
    results: flags.Results = "results",
    device: flags.Device = "auto",
) -> int:
    """Export trained runs as checkpoints that public code loads, as ONNX graphs, or as entries of the ledger.

    ledger: a JSON file in OUT with counts, digests, versions and hardware, for docs/results/ledger.
    onnx: model.onnx maps images to logits of the classes that the run learned. dassl: the checkpoint
    OUT/RUN/MODEL/model.pth.tar-EPOCHS, with MODEL as the public code names it. Load it there with --model-dir OUT/RUN
    --load-epoch EPOCHS.
    """
    check_writable(out)
    runtime = runtime_config(flags.StorageFlags(results=results, device=device))
    # Graphs are exported on the CPU, where their example is.
    is_graph = format == "onnx"
    session = Session(replace(runtime, device="cpu", accelerate="off") if is_graph else runtime)
    failures, files = Failures(len(folders)), {}
    for folder in folders:
        with failures.collect(str(folder)):
            run = find_run(folder, session)
            # These import torch, which a wrong name need not wait for.
            from runner.export import export_model
            from runner.ledger import write_entry
            from runner.public_checkpoints import export_run

            writers = {"onnx": export_model, "ledger": write_entry}
            files[run.path] = writers[format](run, out) if format in writers else export_run(run, out, format)
            note(f"exported {run.path}")
            show(str(files[run.path]))
    code = note_failures(len(files), failures.reasons)
    show_json({"exported": {run: str(file) for run, file in files.items()}, "failed": failures.reasons})
    return code
