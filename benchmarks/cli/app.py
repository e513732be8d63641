"""The command line `procap`. Only typer is imported here: what a command needs is imported when it is called."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli import bench_flags as cli_suites
from benchmarks.cli import report_flags as cli_report
from benchmarks.cli import submit as cli_submit
from benchmarks.cli import sweep_flags as cli_sweep
from benchmarks.cli.flags import (
    EngineFlags,
    ModeFlags,
    OutputFlags,
    PackFlags,
    RecipeFlags,
    RuntimeFlags,
    SelectionFlags,
    flat,
)
from benchmarks.console.errors import explain, unforced
from benchmarks.console.help import PLAIN, examples
from benchmarks.console.output import launched, note, speaks_here, tell_launcher
from procap import __version__
from procap.errors import UsageError
from runner.stop_signals import sigterm_as_interrupt

TOGETHER = ("train", "eval")
"""Commands that several processes carry out together."""

app = typer.Typer(help="Prompt learning on CLIP: from raw images to the tables of the ProCAP paper.", **PLAIN)
data_app = typer.Typer(help="Pack data sets into shards, check them, look at them.", **PLAIN)
track_app = typer.Typer(help="Export results to MLflow.", **PLAIN)
bench_app = typer.Typer(help="The experiments of the paper, by name.", cls=cli_suites.SuiteGroup, **PLAIN)
app.add_typer(data_app, name="data")
app.add_typer(track_app, name="track")
app.add_typer(bench_app, name="bench")


def say_version(wanted: bool) -> None:
    if wanted:
        print(f"procap {__version__}")
        raise typer.Exit


@app.callback(**examples("procap demo", "procap ls methods", "procap COMMAND --help"))
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=say_version, help="print the version")
    ] = False,
) -> None:
    if launched() and context.invoked_subcommand not in TOGETHER:
        raise UsageError(
            f"only procap {' and '.join(TOGETHER)} work in several processes: start procap "
            f"{context.invoked_subcommand} without a launcher"
        )


@app.command(**examples("procap demo", "procap demo --out /tmp/demo", "procap demo --quick --json"))
@flat
def demo(
    output: OutputFlags,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="everything the demo makes lands here")] = Path("demo"),
    data: Annotated[Path | None, typer.Option(metavar="FOLDER", help="packed data sets [default: OUT/data]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="one small data set and two epochs: does it run here?")
    ] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N")] = "auto",
    tracking: Annotated[
        str, typer.Option(metavar="off|URI", help="MLflow store [default: OUT/results/mlflow.db]")
    ] = "",
    limit: Annotated[int | None, typer.Option(metavar="N", help="evaluate on the first N images only, marked")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, write nothing")] = False,
) -> int:
    """Walk the whole road in minutes, offline, on a CPU.

    Zero-shot CLIP, CoOp, MaPLe and ProCAP, trained on base classes and tested on base and novel ones.
    Stop it anywhere and start it again: what is finished is kept.
    """
    from benchmarks.cli.demo import demo as run

    return run(
        out, data=data, quick=quick, device=device, tracking=tracking, limit=limit, dry_run=dry_run, output=output
    )


@app.command(**examples("procap ls methods", "procap ls datasets --json", "procap ls runs --results demo/results"))
@flat
def ls(
    output: OutputFlags,
    what: Annotated[str, typer.Argument(metavar="methods|datasets|backbones|suites|runs", help="what to list")],
    results: Annotated[str, typer.Option(metavar="FOLDER|URL", help="runs and their results")] = "results",
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="packed data sets")] = "",
) -> int:
    """List methods, data sets, backbones, suites or runs."""
    from benchmarks.cli.ls import ls as run

    return run(what, results=results, data=data, output=output)


@app.command(
    **examples(
        "procap train --methods maple --datasets shapes",
        "procap train --methods coop,procap --datasets shapes,digits --seeds 1,2,3 --epochs 10",
        "procap train --methods procap --datasets petals --option infonce=false --dry-run",
        "torchrun --standalone --nproc-per-node 4 --no-python procap train --methods procap --datasets petals",
    )
)
@flat
def train(
    selection: SelectionFlags,
    training: RecipeFlags,
    place: RuntimeFlags,
    parallel: EngineFlags,
    doing: ModeFlags,
    output: OutputFlags,
) -> int:
    """Train methods on data sets. Finished runs are kept, interrupted ones go on where they stopped.

    Started by torchrun, all processes train each run together, with the numbers of one process.
    """
    from benchmarks.cli.train_eval import train as run

    return run(selection, training, place, parallel, doing, output)


@app.command(
    name="eval",
    **examples(
        "procap eval results/base/shapes/maple/mini/16shot/seed1-3fa29c10",
        "procap eval --methods maple --datasets shapes --targets shapes-sketch,digits:all",
        "procap eval --methods zeroshot --datasets tiles --limit 50",
    ),
)
@flat
def evaluate(
    selection: SelectionFlags,
    training: RecipeFlags,
    place: RuntimeFlags,
    doing: ModeFlags,
    output: OutputFlags,
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="run folders, instead of names")] = None,
    targets: Annotated[
        str,
        typer.Option(
            metavar="SET[:CLASSES[:SPLIT]]",
            help="where to test, comma list [default: base and novel classes of the run's own data set]",
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="the first N images only; the result is marked")
    ] = None,
    no_feature_cache: Annotated[
        bool, typer.Option("--no-feature-cache", help="neither read nor keep image features")
    ] = False,
) -> int:
    """Evaluate trained runs on any target.

    Methods that put no prompts into the image tower share its features of a test split, kept in the folder features of
    the cache (2 KB an image at width 512; delete it at will). An evaluation that found them there gives the
    same accuracy but reports no speed; --force computes them again.
    """
    from benchmarks.cli.train_eval import evaluate as run

    return run(runs or [], targets, limit, selection, training, place, doing, output, cached=not no_feature_cache)


@app.command(
    **examples(
        "procap table --results demo/results",
        "procap table --methods coop,procap --format latex > table.tex",
        "procap table base-to-novel --results /shared/results",
        "procap table base-to-novel --check --data /shared/shards",
    )
)
@flat
def table(
    selection: SelectionFlags,
    output: OutputFlags,
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="a suite or `published` [default: one table of all runs]")
    ] = "",
    results: Annotated[str, typer.Option(metavar="FOLDER|URL", help="runs and their results")] = "results",
    format: Annotated[str, typer.Option(metavar="md|csv|latex|json", help="how the table is written")] = "md",
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where data sets of your own are packed")] = "",
    profile: Annotated[
        str, typer.Option(metavar="mini|paper", help="the suite's data [default: those that were run]")
    ] = "",
    paper_rounding: Annotated[
        bool, typer.Option("--paper-rounding", help="accuracies of runs with one decimal, as older logs had them")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="against published: exit code 4 unless all agree, 1: nothing compares")
    ] = False,
    recipe: Annotated[
        str, typer.Option(metavar="published|procap", help="the suite's runs by this recipe [default: those done last]")
    ] = "",
) -> int:
    """Print base, novel, harmonic mean and speed from results, or the tables of a suite beside the paper's.

    Every number is computed from the integer counts of the result files.
    """
    from benchmarks.cli.table import TableFlags
    from benchmarks.cli.table import table as run

    return run(selection, results, format, output, suite, TableFlags(data, profile, paper_rounding, check, recipe))


# Here, as the help lists commands in the order in which they are added.
cli_report.add(app)
cli_sweep.add(app)
cli_submit.add(app)


@app.command(
    **examples(
        "procap ui --results demo/results",
        "procap ui --suite base-to-novel --methods maple,procap",
        "procap ui --sweep rates --open",
        "procap ui --port 5001",
    )
)
@flat
def ui(
    output: OutputFlags,
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="compare these, by part of path")] = None,
    suite: Annotated[str, typer.Option(metavar="NAME", help="compare runs of this suite")] = "",
    sweep: Annotated[str, typer.Option(metavar="NAME", help="compare runs of this sweep")] = "",
    methods: Annotated[str, typer.Option(metavar="A,B", help="compare runs of these methods")] = "",
    datasets: Annotated[str, typer.Option(metavar="A,B", help="compare runs on these data sets")] = "",
    results: Annotated[str, typer.Option(metavar="FOLDER|URL", help="runs and their results")] = "results",
    tracking: Annotated[str, typer.Option(metavar="URI", help="MLflow store [default: mlflow.db in results]")] = "",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="port on 127.0.0.1")] = 5000,
    open_browser: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> int:
    """Look at the runs in MLflow, on this machine only: parallel coordinates, accuracy against images per second."""
    from benchmarks.cli.track import open_ui
    from benchmarks.cli.ui import RunFilter
    from benchmarks.console.parse import split_names

    wanted = RunFilter(runs or [], suite, sweep, split_names(methods), split_names(datasets))
    return open_ui(results, tracking, port, open_browser, wanted)


@data_app.command(
    **examples(
        "procap data pack shapes digits",
        "procap data pack caltech101 dtd eurosat --raw /datasets",
        "procap data pack all --raw /datasets --data /scratch/shards",
        "procap data pack sun397 --raw /datasets --resize 256",
        "procap data pack my-birds.yaml",
        "procap data pack imagenet-a --from https://huggingface.co/datasets/clip-benchmark/wds_imagenet-a/tree/main",
    )
)
@flat
def pack(
    packing: PackFlags,
    output: OutputFlags,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="data sets, YAML files, or a group: all, paper, world")
    ],
    data: Annotated[str, typer.Option(metavar="FOLDER", help="where the shards go")] = "",
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="processes [default: one per core]")] = None,
    force: Annotated[bool, typer.Option("--force", help="pack again what is already there")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan, write nothing")] = False,
) -> int:
    """Pack data sets into WebDataset shards with a manifest.

    Packing twice gives the same bytes; a packing that was stopped goes on where it was. Raw folders are only read.
    """
    from benchmarks.cli.data import pack as run

    return run(names, data, packing, workers, force, dry_run, output)


@data_app.command(
    **examples(
        "procap data check",
        "procap data check shapes --data demo/data",
        "procap data check --raw /datasets",
        "procap data check oxford-pets --raw /datasets --no-decode",
    )
)
@flat
def check(
    output: OutputFlags,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="data sets [default: all]")] = None,
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where the shards are")] = "",
    raw: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="check raw folders below this one instead of shards")
    ] = None,
    no_decode: Annotated[bool, typer.Option("--no-decode", help="raw: do not open every image")] = False,
    workers: Annotated[int | None, typer.Option(metavar="N", min=1, help="processes [default: one per core]")] = None,
) -> int:
    """Check packed shards (hashes, every image), or raw folders against the published lists."""
    from benchmarks.cli.data_check import check as run

    return run(names or [], data, PackFlags(raw=raw), not no_decode, workers, output)


@data_app.command(
    name="show", **examples("procap data show petals --out petals.png", "procap data show shapes --split train")
)
@flat
def show(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where the shards are")] = "",
    split: Annotated[str, typer.Option(metavar="NAME", help="train, val or test")] = "test",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="picture to write [default: NAME-SPLIT.png]")] = None,
) -> int:
    """Write a contact sheet: a few images of every class."""
    from benchmarks.cli.data import show as run

    return run(name, data, split, out, output)


@data_app.command(
    **examples(
        "procap data few-shot shapes --shots 16 --seed 1",
        "procap data few-shot caltech101 --out caltech101-16-1.json",
        "procap data few-shot caltech101 --import caltech-101/split_fewshot/shot_16-seed_1.pkl",
    )
)
@flat
def few_shot(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a packed data set")],
    data: Annotated[str, typer.Option(metavar="FOLDER|URL", help="where the shards are")] = "",
    shots: Annotated[int, typer.Option(metavar="N", min=1, help="training images per class")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="of the draw")] = 1,
    classes: Annotated[str, typer.Option(metavar="all|base|novel", help="whose images are listed")] = "all",
    split_digests: Annotated[bool, typer.Option("--split-digests", help="print digests of whole splits too")] = False,
    source: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="take CoOp's .pkl cache, or .json of --out, instead")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the samples as JSON")] = None,
) -> int:
    """List the few-shot images of a data set, as CoOp's rule draws them, or import those of CoOp itself."""
    from benchmarks.cli.data_few_shot import Request
    from benchmarks.cli.data_few_shot import few_shot as run

    return run(name, data, Request(shots, seed, classes, split_digests, source, out), output)


@track_app.callback()
def track() -> None:
    # With a single command typer would otherwise leave out its name.
    pass


@track_app.command(**examples("procap track sync --results demo/results", "procap track sync --dry-run"))
@flat
def sync(
    output: OutputFlags,
    results: Annotated[str, typer.Option(metavar="FOLDER|URL", help="runs and their results")] = "results",
    tracking: Annotated[str, typer.Option(metavar="URI", help="MLflow store [default: mlflow.db in results]")] = "",
    log_checkpoints: Annotated[bool, typer.Option("--log-checkpoints", help="copy checkpoints as well")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would be sent")] = False,
) -> int:
    """Export to MLflow what its store lacks. Repeating it sends nothing twice."""
    from benchmarks.cli.track import track_sync

    return track_sync(results, tracking, log_checkpoints, dry_run, output)


@bench_app.callback(**examples("procap bench all --profile mini --quick", "procap bench base-to-novel --help"))
def bench() -> None:
    # With a single command typer would otherwise leave out its name.
    pass


@bench_app.command(
    **examples(
        "procap bench runtime",
        "procap bench runtime --backbone ViT-B/16 --random --steps 3",
        "procap bench runtime --datasets oxford-flowers,ucf101 --backbone ViT-B/16 --precision fp32,bf16",
        "procap bench runtime --check",
    )
)
@flat
def runtime(
    place: RuntimeFlags,
    output: OutputFlags,
    methods: Annotated[str, typer.Option(metavar="A,B", help="methods to compare")] = "zeroshot,maple,procap",
    datasets: Annotated[
        str,
        typer.Option(metavar="A,B", help="data sets; photographs-102: made-up images, as many as 16-shot Flowers102"),
    ] = "",
    modes: Annotated[str, typer.Option(metavar="A,B", help="reference works as public code does")] = "reference,fast",
    precision: Annotated[str, typer.Option(metavar="fp32,bf16", help="one or both [default: fp32]")] = "",
    backbone: Annotated[str, typer.Option(metavar="NAME", help="CLIP [default: mini]")] = "",
    pretrained: Annotated[str, typer.Option(metavar="TAG|FILE", help="weights of the backbone")] = "",
    random: Annotated[bool, typer.Option("--random", help="random weights; no accuracy is shown then")] = False,
    epochs: Annotated[int, typer.Option(metavar="N", help="of every training")] = 10,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="measure N training steps and extrapolate, which the table says")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="rounds of evaluation and of every size")] = 5,
    batch: Annotated[int, typer.Option(metavar="N", help="images per training step")] = 32,
    test_batch: Annotated[int, typer.Option(metavar="N", help="images per evaluated batch")] = 100,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="measure what fits, extrapolate and limit the rest, and say so; 0: no limit "
            "[default: 150 for mini and 900 else on a CPU, no limit on a GPU]",
        ),
    ] = None,
    scaling: Annotated[
        str, typer.Option(metavar="CLASSESxBATCHES|off", help="sizes, as in 10,50,200x4,32, the default with mini")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="say what is to be reached, met or not; chooses full size on a GPU")
    ] = False,
) -> int:
    """Time training and inference of every method, as public code does it and as this program does.

    Seconds of ten epochs, images per second, memory, operations against the peak of this device, and accuracy, beside
    the paper's table. Nothing else should run on the machine.
    """
    from benchmarks.runtime.benchmark import Flags, bench_runtime

    flags = Flags(
        methods=methods,
        datasets=datasets,
        modes=modes,
        precision=precision,
        backbone=backbone,
        pretrained=pretrained,
        random=random,
        epochs=epochs,
        steps=steps,
        repeats=repeats,
        batch=batch,
        test_batch=test_batch,
        budget=budget,
        scaling=scaling,
        check=check,
    )
    return bench_runtime(flags, place, output)


@contextmanager
def notes_for_people() -> Iterator[None]:
    """Warnings meant for the user are one line like everything else; those of libraries keep their form."""
    plain = warnings.formatwarning

    def formatted(message: Any, category: type[Warning], *place: Any, **more: Any) -> str:
        ours = {"procap", "shards", "runner", "cluster", "benchmarks"}
        own = category is UserWarning and place and not ours.isdisjoint(Path(place[0]).parts[-3:-1])
        return f"procap: note: {message}\n" if own else plain(message, category, *place, **more)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = plain


def run(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 failed, 2 wrong usage, 3 some runs failed, 4 outside of what is published, 128 + signal.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = "-v" in arguments or "--verbose" in arguments
    try:
        with sigterm_as_interrupt() as terminated, notes_for_people():
            command = typer.main.get_command(app)
            code = command.main(args=arguments or ["--help"], prog_name="procap", standalone_mode=False)
        sys.stdout.flush()
        # Typer turns an interrupt into this code and says nothing.
        if code == 130:
            note(f"procap: stopped; repeat the command to go on{unforced(arguments)}")
            return 143 if terminated else 130
        return int(code or 0)
    except BrokenPipeError:
        # The reader of a pipe left, e.g. `| head`; the interpreter must not complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message, exit_code = explain(error)
        message += unforced(arguments) if exit_code > 128 else ""
        tell_launcher(f"procap: {message}")
        printed = getattr(error, "printed_elsewhere", None)
        # Before processes have met, all of a machine run into the same errors.
        if speaks_here() if printed is None else not printed:
            if verbose:
                traceback.print_exc()
            print(f"procap: {message}", file=sys.stderr)
        return exit_code
