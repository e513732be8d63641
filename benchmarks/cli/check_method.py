"""`procap check method`: check a method against what the program relies on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import Data, command, flag
from benchmarks.console.output import columns, note, note_trace, show, show_json
from benchmarks.console.packing_progress import pack_missing_with_progress
from benchmarks.console.parse import parse_methods, parse_options, split_names
from procap.errors import UsageError, check_names
from runner.config import EvalSettings, RuntimeConfig
from shards.default_paths import data_root


@command(
    "procap check method visual-tokens",
    "procap check method visual-tokens --only gradients,determinism --option n_ctx=2",
)
def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a method, see `procap ls methods`")],
    only: Annotated[str, flag("A,B", "checks to run [default: all]")] = "",
    option: Annotated[list[str] | None, flag("KEY=VALUE", "option of the method, repeatable")] = None,
    dataset: Annotated[str, flag("NAME", "data set of the checks")] = "shapes",
    backbone: Annotated[str, flag("NAME|FILE", "backbone of the checks")] = "mini",
    data: Data = "",
) -> int:
    """Check a method and print what passed and what failed; the exit code is 1 if a check failed.

    shapes: loss terms and logits have the right shapes. inference: logits depend on what is learned. gradients: every
    learned tensor gets one, and CLIP gets none. capture: names an operation that keeps a GPU from replaying steps as
    CUDA graphs. determinism: equal seeds give equal tensors. resume: an interrupted
    training ends with the same bits. reloaded: a method loaded from a checkpoint classifies as the trained one.
    processes: two learn the weights of one. It takes about half a minute on a CPU.
    """
    # Raises for a class that cannot be loaded.
    parse_methods(name)
    options = parse_options(option or (), [name])[name]
    from runner.method_check import CHECKS, CheckCase, check_method

    names = split_names(only)
    check_names("check", names, CHECKS)
    root = data_root(data)
    pack_missing_with_progress([dataset], root)
    runtime = RuntimeConfig(root, Path(), device="cpu", tracking_uri="off", quiet=True)
    case = CheckCase.plan(name, runtime, dataset=dataset, backbone=backbone, options=options)
    if not EvalSettings().sample_fields(case.config):
        raise UsageError(f"{name} trains nothing: there is nothing to check")
    results = []
    for result in check_method(case, names):
        note(f"{result.name}: {'passed' if result.passed else 'failed'}")
        note_trace(result.trace)
        results.append(result)
    rows = [(result.name, "passed" if result.passed else "FAILED", result.note) for result in results]
    show(columns(("check", "result", "note"), rows))
    failed = [result.name for result in results if not result.passed]
    show_json({"method": name, "checks": [asdict(result) for result in results]})
    outcome = f"{len(failed)} failed" if failed else "all passed"
    note(f"{name}: {len(results)} of {len(CHECKS)} checks ran, {outcome}")
    return 1 if failed else 0
