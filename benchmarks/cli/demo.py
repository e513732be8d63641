"""`procap demo`: the whole road in minutes, offline, on a CPU, made of the same calls as the other commands.

    procap demo                 about four minutes on two CPU cores; stop it anywhere and start it again
    procap demo --quick         one data set, two epochs: does everything run here?

CoOp, MaPLe and ProCAP are trained with ProCAP's recipe, shortened; `procap train` uses their published ones. A rate
that fits one method's numbers is far too slow or too fast for another's, so each has its own, chosen on the validation
images of base classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cli.flags import OutputFlags
from benchmarks.cli.selection import targets_of
from benchmarks.cli.train_eval import Failures, evaluate_all, show_plan, train_all
from benchmarks.console.output import note, plural, quoted, show, show_json
from benchmarks.console.packing import ensure_packed
from benchmarks.plots.base_novel import draw_figures
from benchmarks.results.scores import Score, read_scores
from benchmarks.tables.formats import as_json, render, write_sheets
from benchmarks.tables.plain import build_table
from benchmarks.tables.runs import run_sheets
from procap.errors import UserError
from runner.config import RunConfig, RuntimeConfig, plan_run
from runner.environment import library_defaults, resolve_device

METHODS = ("zeroshot", "coop", "maple", "procap")


# Highest mean accuracy over the four data sets' base validation images, on mini at 10 epochs: in steps of 4 from 4e-2
# down, until the best was no longer at the end. CoOp 72.4, MaPLe 92.4, ProCAP 92.2; no test image had a say.
RATES: Mapping[str, float] = {"coop": 4e-2, "maple": 1e-2, "procap": 3.90625e-5}


@dataclass(frozen=True)
class Schedule:
    """Which data sets, and for how long: ProCAP's recipe with these fields changed, for every method."""

    datasets: tuple[str, ...]
    epochs: int
    batch_size: int = 16
    warmup_epochs: int = 1


FULL = Schedule(("shapes", "textures", "petals", "digits"), epochs=10)
QUICK = Schedule(("digits",), epochs=2)


def demo_configs(schedule: Schedule) -> list[RunConfig]:
    """The runs: every method on the base classes of every data set, 16 shots, seed 1, data set by data set."""
    changes = {"epochs": schedule.epochs, "batch_size": schedule.batch_size, "warmup_epochs": schedule.warmup_epochs}
    return [
        plan_run(
            method=method,
            dataset=dataset,
            classes="base",
            shots=16,
            seed=1,
            recipe="procap",
            overrides=changes | ({"lr": RATES[method]} if method in RATES else {}),
        )
        for dataset in schedule.datasets
        for method in METHODS
    ]


def demo(
    out: Path,
    *,
    data: Path | None,
    quick: bool,
    device: str,
    tracking: str,
    limit: int | None,
    dry_run: bool,
    output: OutputFlags,
) -> int:
    """Pack, train, evaluate, tabulate, draw; what is finished is not repeated. See `procap demo --help`."""
    library_defaults()
    out = out.expanduser()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    schedule = QUICK if quick else FULL
    at = RuntimeConfig(
        data=(data or out / "data").expanduser(),
        results=out / "results",
        device=device,
        limit=limit,
        tracking_uri=tracking or None,
    )
    configs = demo_configs(schedule)
    if dry_run:
        return show_plan(configs, at, targets_of, output)
    resolve_device(device)
    steps = 5 if tracking != "off" else 4

    note(f"1/{steps}  pack {plural(len(schedule.datasets), 'data set')} into {at.data}")
    ensure_packed(schedule.datasets, at.data)
    looks = [_contact_sheet(name, at.data, out / "figures") for name in schedule.datasets]

    note(f"2/{steps}  train and evaluate {plural(len(configs), 'run')} below {at.results}")
    failures = Failures(len(configs), verbose=output.verbose)
    for number, config in enumerate(configs, 1):
        for trained in train_all([config], at, failures, first=number, of=len(configs)):
            evaluate_all([(trained, at, target) for target in targets_of(trained)], failures, "procap demo")

    note(f"3/{steps}  table")
    scores = _scores(at, configs)
    table = build_table(scores)
    tables = run_sheets(table)
    files = write_sheets(tables, out)

    note(f"4/{steps}  figures")
    figures = draw_figures(table, scores, out / "figures")

    if steps == 5:
        note(f"5/{steps}  MLflow")
        note(f"  {_send(at)}")
    show("\n\n".join(render(sheet, "md") for sheet in tables))
    show(_where(out, at, files, [*figures, *looks], steps == 5))
    code = failures.exit_code(len(scores))
    if output.json:
        made: dict[str, Any] = {"tables": list(map(str, files)), "figures": list(map(str, [*figures, *looks]))}
        made["sheets"] = [as_json(sheet) for sheet in tables]
        show_json({"results": str(at.results), "failed": failures.found, **made})
    return code


def _contact_sheet(name: str, data: Path, folder: Path) -> Path:
    """A look at the test images; one that is newer than the shards is kept."""
    from shards.contact_sheet import contact_sheet
    from shards.manifest import FILE

    picture = folder / f"data-{name}.png"
    if picture.exists() and picture.stat().st_mtime > (data / name / FILE).stat().st_mtime:
        return picture
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; name another folder with --out") from error
    return contact_sheet(data, name, "test", picture)


def _scores(at: RuntimeConfig, configs: Sequence[RunConfig]) -> list[Score]:
    """The scores of this demo's own runs: a folder may hold those of another schedule too."""
    wanted = {config.path for config in configs}
    scores = read_scores(at.results, lambda config: config.path in wanted)
    if not scores:
        raise UserError(f"no run of the demo could be finished below {at.results}; see what failed above")
    return scores


def _send(at: RuntimeConfig) -> str:
    """Send what the tracker missed while the runs went on; a store that is down does not fail the demo."""
    from runner.tracking.export import sync

    try:
        summary = sync(at.results, at.tracking_uri)
    except UserError as error:
        return f"not sent: {error}; later: procap track sync --results {quoted(at.results)}"
    failed = f", {len(summary.failed)} failed" if summary.failed else ""
    return f"{plural(summary.up_to_date + len(summary.sent), 'run')} in {summary.destination}{failed}"


def _where(out: Path, at: RuntimeConfig, tables: Sequence[Path], figures: Sequence[Path], tracked: bool) -> str:
    """Where everything is and what to type next."""
    forms: dict[str, list[str]] = {}
    for file in tables:
        forms.setdefault(file.stem, []).append(file.suffix[1:])
    lines = [
        "",
        "Where things are",
        *(f"  table      {out / name}.{{{','.join(endings)}}}" for name, endings in forms.items()),
        f"  figures    {out / 'figures'}: {', '.join(file.stem for file in figures)}",
        f"  runs       {at.results} (config, checkpoint, counts, timings of each)",
        f"  shards     {at.data}",
        "",
        "What to type next",
    ]
    data, results = f"--data {quoted(at.data)}", f"--results {quoted(at.results)}"
    more = "--methods procap --datasets tiles --epochs 10"
    if tracked:
        lines.append(f"  procap ui {results}")
    lines += [
        f"  procap table {results} --format latex",
        f"  procap train {more} {data} {results}",
        f"  procap eval {more} {data} {results}",
        f"  procap data show {figures[-1].stem.removeprefix('data-')} {data} --split train",
        "  procap ls methods",
    ]
    return "\n".join(lines)
