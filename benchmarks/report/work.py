"""Make tables of what ran, on which machines, for how long and at what cost.

Everything is computed from one frame with a row per training, evaluation and further job of a suite. A run that several
suites share counts once in all sums over suites.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.report.found import FoundSuite, merge_unfinished
from benchmarks.results.metrics import Metric
from benchmarks.tables.runtime import newest_measurement
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError
from runner.config import Target
from runner.results import RunFolder

if TYPE_CHECKING:
    import pandas as pd

HOUR = 3600.0
OWN_LINE = ("System", "CUDA", "Source")
"""Versions that are shown apart from those of libraries."""


def read_work(suites: Iterable[FoundSuite]) -> pd.DataFrame:
    """Read one row per suite and training (`kind` train), evaluation (eval) and further job (other: runtime, pictures).

    Trained runs count before they are evaluated; methods that train nothing have no training.

    Columns: suite, kind, path, target; seconds of the job, and its number of processes (evaluations do not record
    theirs and count as one); gpu, whether it ran on one, and the mean watts of its GPUs, NaN where not measured;
    machine and environment.
    """
    import pandas as pd

    columns = ["suite", "kind", "path", "target", "seconds", "environment", "watts", "processes"]
    work = pd.DataFrame([job for one in suites for job in _read_jobs(one)], columns=columns).astype({"watts": float})
    gpus = [bool(environment.get("gpu")) for environment in work.environment]
    return work.assign(gpu=pd.array(gpus, bool), machine=list(map(describe_machine, work.environment)))


def _read_jobs(one: FoundSuite) -> list[tuple[Any, ...]]:
    """List the jobs of a suite, each as the first columns of the frame."""
    jobs: list[tuple[Any, ...]] = []
    evaluated = one.results.frame.groupby("path").target.unique().to_dict()
    for path in one.results.paths:
        folder = RunFolder(one.results.results / path)
        # Unreadable files are listed as problems of their run.
        with suppress(UserError):
            if (run := folder.train()) and run.steps:
                processes = max(1, len(run.ranks))
                jobs.append((one.name, "train", path, "", run.seconds, run.environment, run.use.gpu_watts, processes))
        for target in evaluated.get(path, ()):
            with suppress(UserError):
                result = folder.evaluation(Target.recorded(target))
                assert result is not None
                use = result.use.gpu_watts
                jobs.append((one.name, "eval", path, target, result.seconds, result.environment, use, 1))
    # A suite without runs measures runtime.
    other = one.results.pictures if one.results.runs else newest_measurement(one.results) or {}
    if "seconds" in other:
        jobs.append((one.name, "other", one.name, "", other["seconds"], other.get("environment") or {}, None, 1))
    return jobs


def drop_shared(work: pd.DataFrame) -> pd.DataFrame:
    """Return the jobs of all suites, each once."""
    return work.drop_duplicates(["kind", "path", "target"])


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Name GPU and processor, as a result recorded them."""
    cpu = environment.get("cpu") or {}
    threads = f", {plural(cpu['threads'], 'thread')}" if cpu.get("threads") else ""
    processor = f"{cpu['name']} ({plural(cpu['cores'], 'core')}{threads})" if cpu.get("name") else "not recorded"
    return f"{environment['gpu']}, {processor}" if environment.get("gpu") else processor


def suites_table(suites: Sequence[FoundSuite], work: pd.DataFrame) -> Table:
    """Make a row per suite and one for all: number of runs and evaluations, and how long they took."""
    parts = [(one.name, one.results.paths, len(one.unfinished), work[work.suite == one.name]) for one in suites]
    if len(suites) > 1:
        paths = list(dict.fromkeys(path for one in suites for path in one.results.paths))
        parts.append(("All, shared runs once", paths, len(merge_unfinished(suites)), drop_shared(work)))
    counts = Column("Runs", "", 0), Column("Finished", "", 0), Column("Evaluations", "", 0)
    columns, times = _time_columns([jobs for *_, jobs in parts])
    rows: list[Row] = []
    for (name, paths, unfinished, jobs), cells in zip(parts, times, strict=True):
        numbers = len(paths), len(paths) - unfinished, int((jobs.kind == "eval").sum())
        rows.append(Row((name,), (*map(Metric, numbers), *cells), average=len(rows) == len(suites)))
    notes = (
        "Training: steps and checkpoints, summed over runs, without loading, tracking, and work that was lost and "
        "repeated. Evaluation: class features, warm-up and all images. Other: jobs that are not runs, such as the "
        "runtime comparison and the qualitative pictures.",
    )
    title = "Suites, their runs, and how long they took"
    return Table("report-suites", title, ("Suite",), (*counts, *columns), tuple(rows), notes, wide=True)


def machines_table(work: pd.DataFrame) -> Table:
    """Make a row per kind of machine."""
    machines = {str(name): jobs for name, jobs in drop_shared(work).groupby("machine")}
    counts = Column("Trainings", "", 0), Column("Most processes", "", 0), Column("Evaluations", "", 0)
    columns, times = _time_columns(list(machines.values()))
    rows = []
    for (name, jobs), cells in zip(machines.items(), times, strict=True):
        trained = jobs[jobs.kind == "train"]
        most = int(trained.processes.max()) if len(trained) else 0
        numbers = Metric(len(trained)), Metric(most), Metric(int((jobs.kind == "eval").sum()))
        rows.append(Row((name,), (*numbers, *cells)))
    notes = ("Most processes: of one training. Methods that train nothing have no training.",)
    return Table("report-machines", "Machines", ("Machine",), (*counts, *columns), tuple(rows), notes, wide=True)


def _time_columns(parts: Sequence[pd.DataFrame]) -> tuple[list[Column], list[tuple[Metric | None, ...]]]:
    """Make columns of training, evaluation and other times, each in the unit that fits its longest; cells by part."""
    columns, cells = [], []
    for title, kind in (("Training", "train"), ("Evaluation", "eval"), ("Other", "other")):
        seconds = [float(jobs.seconds[jobs.kind == kind].sum()) for jobs in parts]
        longest = max(seconds, default=0.0)
        unit, size = ("h", HOUR) if longest >= 3 * HOUR else ("min", 60.0) if longest >= 180 else ("s", 1.0)
        columns.append(Column(f"{title}, {unit}", "", 1))
        cells.append([Metric(one / size) if one or kind != "other" else None for one in seconds])
    return columns, list(zip(*cells, strict=True))


def _wall_clock(suites: Iterable[FoundSuite]) -> float | None:
    """Compute seconds in which the command of at least one suite was running; None while one is, or was killed."""
    total, until = 0, 0
    for one in sorted((one.collection for one in suites), key=lambda one: one.started):
        if one.ended is None:
            return None
        total += max(0, one.ended - max(one.started, until))
        until = max(until, one.ended)
    return total / 1000


def describe_cost(suites: Iterable[FoundSuite], work: pd.DataFrame, price: float | None = None) -> list[str]:
    """Describe in sentences what everything cost. price: of an hour of a GPU, or of a machine without one."""
    jobs = drop_shared(work)
    hours = jobs.seconds * jobs.processes / HOUR
    gpu, cpu, metered = hours[jobs.gpu].sum(), hours[~jobs.gpu].sum(), hours[jobs.gpu & jobs.watts.notna()].sum()
    parts = [f"{gpu:.2f} GPU-hours"] if gpu else []
    if cpu or not gpu:
        parts.append(f"{cpu:.2f} machine-hours without a GPU")
    found = [f"Training, evaluation and other jobs took {' and '.join(parts)}, counting every process of a training."]
    if metered:
        of = "" if metered == gpu else f" in the {metered:.2f} GPU-hours where it was measured"
        found.append(f"The GPUs drew {(hours * jobs.watts)[jobs.gpu].sum() / 1000:.2f} kWh{of}.")
    if price is not None:
        found.append(f"At {price:g} an hour, of a GPU or a machine, that is {hours.sum() * price:.2f}.")
    if clock := _wall_clock(suites):
        found.append(f"The commands ran for {clock / HOUR:.2f} hours, from the start of each suite to its end.")
    return found


def list_versions(work: pd.DataFrame) -> list[tuple[str, str]]:
    """List system, CUDA, source and library versions of all results, with several where they differ."""
    found: dict[str, set[str]] = {}
    for environment in filter(None, drop_shared(work).environment):
        git = environment.get("git")
        source = f"commit {git['commit'][:12]}{' with changes' * git['dirty']}" if git else "an installed copy"
        versions = {"System": environment.get("platform"), "CUDA": environment.get("cuda"), "Source": source}
        versions |= {"Python": environment.get("python"), **(environment.get("packages") or {})}
        for name, version in versions.items():
            if version:
                found.setdefault(name, set()).add(str(version))
    texts = {name: " / ".join(sorted(versions)) for name, versions in found.items()}
    texts["Versions"] = ", ".join(f"{name} {text}" for name, text in texts.items() if name not in OWN_LINE)
    return [(name, texts[name]) for name in (*OWN_LINE, "Versions") if texts.get(name)]
