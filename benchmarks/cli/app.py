"""Define the program `procap`: import each command when it is used, and turn errors into messages and exit codes."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from benchmarks.cli.flags import HELP_NAMES, PLAIN, examples
from benchmarks.console.errors import explain
from benchmarks.console.output import VERBOSE, is_distributed, note, note_trace, safe_output, write_error_file
from procap.errors import UsageError, unknown_name
from runner.environment_defaults import set_environment_defaults
from runner.stop_signals import sigterm_as_interrupt

DISTRIBUTED = ("train", "eval")
"""Commands that torchrun may start as several processes."""
ONLINE = "data", "push", "fetch"
"""Commands that use the Hub without an hf:// argument."""

Commands = Mapping[str, tuple[Any, str]]
"""By name: `module:name` of a command or the commands of a group, and a summary."""


def lazy_group(headings: Mapping[str, Commands]) -> type[TyperGroup]:
    """Make a group of commands, each of which is imported when it is used; its help needs no import."""
    commands = {name: command for section in headings.values() for name, command in section.items()}

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in commands:
                raise unknown_name("command", cmd_name, commands)
            contents, summary = commands[cmd_name]
            if isinstance(contents, str):
                module, _, name = contents.partition(":")
                function = getattr(importlib.import_module(module), name)
                # `flags.command` keeps the typer app of a function in an attribute; `bench` is an app itself.
                app = getattr(function, "app", function)
            else:
                app = typer.Typer(help=summary, cls=lazy_group({"Commands": contents}), **PLAIN)
                # Without a callback typer refuses an app whose commands it does not know.
                app.callback(context_settings=HELP_NAMES)(lambda: None)
            command = typer.main.get_command(app)
            command.name = cmd_name
            return command

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            for heading, section in headings.items():
                with formatter.section(heading):
                    formatter.write_dl([(name, summary) for name, (_, summary) in section.items()])

    return LazyGroup


DATA_COMMANDS: Commands = {
    "fetch": ("benchmarks.cli.data_fetch:fetch_datasets", "Download published data sets and pack them."),
    "pack": ("benchmarks.cli.data_pack:pack", "Pack data sets into WebDataset shards."),
    "check": ("benchmarks.cli.data_check:check", "Check packed shards: hashes and images."),
    "show": ("benchmarks.cli.data_show:show", "Show the classes and images of a packed data set."),
    "few-shot": ("benchmarks.cli.data_few_shot:few_shot", "List the few-shot training images."),
}
CHECK_COMMANDS: Commands = {
    "method": ("benchmarks.cli.check_method:method", "Run contract tests on a method."),
    "device": ("benchmarks.cli.check_device:check", "Compare faster paths with the plain one on this device."),
}
HEADINGS: Mapping[str, Commands] = {
    "Start": {
        "demo": ("benchmarks.cli.demo:demo", "Run a small benchmark end to end, offline, on a CPU."),
        "ls": ("benchmarks.cli.ls:ls", "List methods, data sets, backbones, suites or runs."),
        "data": (DATA_COMMANDS, "Fetch data sets, pack them into shards, check and show them."),
        "fetch": (
            {"backbone": ("benchmarks.cli.fetch_backbone:backbone", "Download the weights of a CLIP.")},
            "Download weights.",
        ),
        "clean": ("benchmarks.cli.clean:clean", "Delete caches that later commands make again."),
    },
    "One run": {
        "train": ("benchmarks.cli.train:train", "Train methods on data sets."),
        "eval": ("benchmarks.cli.eval:evaluate", "Evaluate trained runs on any target."),
        "predict": ("benchmarks.cli.predict:predict", "Classify new images with a trained run."),
        "import": ("benchmarks.cli.import_checkpoint:import_checkpoint", "Import public checkpoints as finished runs."),
        "export": ("benchmarks.cli.export_run:export", "Export trained runs for public code, ONNX and the ledger."),
        "push": ("benchmarks.cli.push:push", "Publish a trained run on the Hugging Face Hub."),
    },
    "Many runs": {
        "bench": ("benchmarks.cli.bench:app", "Run the experiments of the paper, by name."),
        "sweep": ("benchmarks.cli.sweep:sweep", "Search hyperparameters with Ray Tune."),
        "submit": ("benchmarks.cli.submit:submit", "Run a command on a Ray cluster and follow its log."),
    },
    "Results": {
        "table": ("benchmarks.cli.table:table", "Print results as tables, with the paper's numbers."),
        "report": ("benchmarks.cli.report:report", "Write one HTML page of runs, suites and sweeps."),
        "track": (
            {"sync": ("benchmarks.cli.track:sync", "Upload missing results to MLflow.")},
            "Send results to MLflow.",
        ),
        "ui": ("benchmarks.cli.ui:ui", "Serve MLflow on this machine, with a link to the runs."),
    },
    "Methods and devices": {
        "new": (
            {"method": ("benchmarks.cli.new_method:method", "Write a package with a new method.")},
            "Add a method.",
        ),
        "check": (CHECK_COMMANDS, "Check a method, or which accelerations suit this device."),
    },
}

program = typer.Typer(
    help="Adapt CLIP to few images: from raw image folders to the tables of the ProCAP paper.",
    cls=lazy_group(HEADINGS),
    **{**PLAIN, "add_completion": True},
)


def print_version(is_asked: bool) -> None:
    """Print versions, device and commit, as bug reports need them."""
    if is_asked:
        import torch

        from runner.provenance import program_version

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        print(f"procap {program_version()}; Python {platform.python_version()}, torch {torch.__version__}, {device}")
        raise typer.Exit


@program.callback(**examples("procap demo", "procap ls methods", "procap COMMAND --help"))
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="print versions and device")
    ] = False,
) -> None:
    if is_distributed() and context.invoked_subcommand not in DISTRIBUTED:
        raise UsageError(
            f"only procap {' and '.join(DISTRIBUTED)} work in several processes: start procap "
            f"{context.invoked_subcommand} without a launcher"
        )


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show the text of a warning once, without the source line that raised it."""
    plain, shown = warnings.formatwarning, set[str]()

    def format_once(message: Warning | str, *_: Any, **__: Any) -> str:
        text = str(message)
        # Nothing is printed for an empty text; all runs of a command share what was shown.
        line = "" if text in shown else f"procap: note: {text}\n"
        shown.add(text)
        return line

    warnings.formatwarning = format_once
    try:
        yield
    finally:
        warnings.formatwarning = plain


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raise UsageError for an empty argument: pathlib takes an empty path for the current folder."""
    # What follows -- is a command that `submit` sends.
    checked = takewhile("--".__ne__, arguments) if "submit" in arguments[:1] else arguments
    for before, word in pairwise(["an argument", *checked]):
        if re.fullmatch("(--[a-z-]+=)?", word):
            what = word or (before if before.startswith("--") else "an argument")
            raise UsageError(f"{what} is empty: is a variable of the shell not set?")


def require_current_folder() -> None:
    """Raise UsageError in a deleted folder, where errors of relative paths have no name and MKL ends the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists: change to another one") from None


@safe_output()
def run(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 failed, 2 wrong usage, 3 some runs failed, 4 not what was published or aimed at, 128 + signal.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    VERBOSE.set(not {"-v", "--verbose"}.isdisjoint(takewhile("--".__ne__, arguments)))
    if "--download" in arguments:
        # Before huggingface_hub is imported, and for the processes that this one starts.
        os.environ["HF_HUB_OFFLINE"] = "0"
    is_online = bool(arguments) and arguments[0] in ONLINE
    set_environment_defaults(online=is_online or any("hf:/" in word for word in arguments))
    # If this process has run a command before, this one asks servers again. Most commands import no mirror.
    if mirror := sys.modules.get("shards.mirror"):
        mirror.refresh.cache_clear()
    try:
        with sigterm_as_interrupt() as terminated, one_line_warnings():
            refuse_empty(arguments)
            require_current_folder()
            command = typer.main.get_command(program)
            # Without standalone mode Click raises errors instead of printing them and ending the process.
            code = command.main(args=arguments or ["--help"], prog_name="procap", standalone_mode=False)
        sys.stdout.flush()
        # Typer turns an interrupt into this code without a message.
        if code == 130:
            note("procap: stopped; what was finished is kept")
            return 143 if terminated else 130
        return int(code or 0)
    except BrokenPipeError:
        # The reader of a pipe has ended, e.g. `| head`; prevent another error when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message, exit_code = explain(error, arguments)
        write_error_file(f"procap: {message}")
        # Wrong usage and signals have one message in all processes; torchrun prints the first other failure itself.
        is_first = not is_distributed() or os.environ["LOCAL_RANK"] == "0"
        if is_first or (exit_code == 1 and "TORCHELASTIC_ERROR_FILE" not in os.environ):
            note_trace(traceback.format_exc())
            print(f"procap: {message}", file=sys.stderr)
        return exit_code
