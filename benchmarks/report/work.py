"""Tables of what ran, on which machines, for how long and at what cost.

Everything is computed from one frame with a row per training, evaluation and further job of a suite. A run that several
suites share counts once in all sums over suites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.report.found import FoundSuite, merge_unfinished
from benchmarks.results.metrics import Metric
from benchmarks.results.pictures import read_pictures
from benchmarks.tables.runtime import newest_measurement
from benchmarks.tables.table import Cell, Column, Row, Table
from procap.errors import UserError
from runner.config import Target
from runner.results import EvalResult, RunFolder, TrainResult

if TYPE_CHECKING:
    import pandas as pd

HOUR = 3600.0


def read_work(suites: Iterable[FoundSuite]) -> pd.DataFrame:
    """One row per suite and training (`kind` train), evaluation (eval) and further job (other: runtime, pictures).

    Trained runs count before they are evaluated; methods that train nothing have no training.

    Columns: suite, kind, path, target; seconds of the job, and its number of processes (evaluations do not record
    theirs and count as one); gpu, whether it ran on one, and the mean watts of its GPUs, NaN where not measured;
    machine and environment.
    """
    import pandas as pd

    columns = ["suite", "kind", "path", "target", "seconds", "processes", "gpu", "watts", "machine", "environment"]
    records = [record for one in suites for record in _read_jobs(one)]
    return pd.DataFrame(records, columns=columns)


def _read_jobs(one: FoundSuite) -> list[dict[str, Any]]:
    records = []
    evaluated = one.results.frame.groupby("path").target.unique().to_dict()
    for path in one.paths:
        folder = RunFolder(one.results.results / path)
        # Unreadable files are listed as problems of their run.
        with suppress(UserError):
            training = folder.train()
            if training and training.steps:
                records.append(_make_record(one, "train", path, "", training, max(1, len(training.ranks))))
        for target in evaluated.get(path, ()):
            with suppress(UserError):
                evaluation = folder.evaluation(Target.recorded(target))
                assert evaluation is not None
                records.append(_make_record(one, "eval", path, target, evaluation, 1))
    # A suite without runs measures runtime.
    other = read_pictures(one.results) if one.results.runs else newest_measurement(one.results) or {}
    if "seconds" in other:
        environment = other.get("environment") or {}
        records.append(_describe_job(one, "other", one.name, "", other["seconds"], 1, math.nan, environment))
    return records


def _make_record(
    one: FoundSuite, kind: str, path: str, target: str, result: TrainResult | EvalResult, processes: int
) -> dict[str, Any]:
    watts = math.nan if result.use.gpu_watts is None else result.use.gpu_watts
    return _describe_job(one, kind, path, target, result.seconds, processes, watts, result.environment)


def _describe_job(
    one: FoundSuite,
    kind: str,
    path: str,
    target: str,
    seconds: float,
    processes: int,
    watts: float,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "suite": one.name,
        "kind": kind,
        "path": path,
        "target": target,
        "seconds": seconds,
        "processes": processes,
        "gpu": bool(environment.get("gpu")),
        "watts": watts,
        "machine": describe_machine(environment),
        "environment": environment,
    }


def drop_shared(work: pd.DataFrame) -> pd.DataFrame:
    """The jobs of all suites, each once."""
    return work.drop_duplicates(["kind", "path", "target"])


def describe_machine(environment: Mapping[str, Any]) -> str:
    """GPU and processor, as a result recorded them."""
    cpu = environment.get("cpu") or {}
    threads = f", {plural(cpu['threads'], 'thread')}" if cpu.get("threads") else ""
    processor = f"{cpu['name']} ({plural(cpu['cores'], 'core')}{threads})" if cpu.get("name") else "not recorded"
    return f"{environment['gpu']}, {processor}" if environment.get("gpu") else processor


def suites_table(suites: Sequence[FoundSuite], work: pd.DataFrame) -> Table:
    """One row per suite and one for all: number of runs and evaluations, and how long they took."""
    parts = [
        (one.name, one.paths, one.unfinished, work[work.suite == one.name], _own_clock(one, suites)) for one in suites
    ]
    if len(suites) > 1:
        paths = list(dict.fromkeys(path for one in suites for path in one.paths))
        merged = tuple(merge_unfinished(suites))
        parts.append(("All, shared runs once", paths, merged, drop_shared(work), _clock(suites)))
    counts = [
        (len(paths), len(paths) - len(unfinished), int((jobs.kind == "eval").sum()))
        for _, paths, unfinished, jobs, _ in parts
    ]
    times = [
        _time_column("Training", [_seconds(jobs, "train") or 0.0 for *_, jobs, _ in parts]),
        _time_column("Evaluation", [_seconds(jobs, "eval") or 0.0 for *_, jobs, _ in parts]),
        _time_column("Other", [_seconds(jobs, "other") for *_, jobs, _ in parts]),
        _time_column("Begin to end", [clock for *_, clock in parts]),
    ]
    rows = [
        Row((name,), (*map(Metric, numbers), *(cells[place] for _, cells in times)), average=place == len(suites))
        for place, ((name, *_), numbers) in enumerate(zip(parts, counts, strict=True))
    ]
    columns = (
        *(Column(title, "", 0) for title in ("Runs", "Finished", "Evaluations")),
        *(column for column, _ in times),
    )
    notes = (
        "Training: steps and checkpoints, summed over runs, without loading, tracking, and work that was lost and "
        "repeated. Evaluation: class features, warm-up and all images. Other: jobs that are not runs, such as the "
        "runtime comparison and the qualitative pictures.",
        "Begin to end: wall-clock time from the start of the first command to the end of the last one, pauses between "
        "them included; given for a suite only if no other suite ran meanwhile, as all do in `procap bench all`.",
    )
    title = "Suites, their runs, and how long they took"
    return Table("report-suites", title, ("Suite",), columns, tuple(rows), notes, wide=True)


def machines_table(work: pd.DataFrame) -> Table:
    """One row per kind of machine."""
    machines = list(drop_shared(work).groupby("machine"))
    trained, evaluated = ([jobs[jobs.kind == kind] for _, jobs in machines] for kind in ("train", "eval"))
    counts = Column("Trainings", "", 0), [Metric(len(jobs)) for jobs in trained]
    processes = [Metric(0 if jobs.empty else int(jobs.processes.max())) for jobs in trained]
    columns: list[tuple[Column, Sequence[Cell]]] = [
        counts,
        _time_column("Training", [_seconds(jobs, "train") or 0.0 for _, jobs in machines]),
        (Column("Most processes", "", 0), processes),
        (Column("Evaluations", "", 0), [Metric(len(jobs)) for jobs in evaluated]),
        _time_column("Evaluation", [_seconds(jobs, "eval") or 0.0 for _, jobs in machines]),
        _time_column("Other", [_seconds(jobs, "other") for _, jobs in machines]),
    ]
    rows = [Row((str(name),), tuple(cells[i] for _, cells in columns)) for i, (name, _) in enumerate(machines)]
    notes = ("Most processes: of one training. Methods that train nothing have no training.",)
    titles = tuple(column for column, _ in columns)
    return Table("report-machines", "Machines", ("Machine",), titles, tuple(rows), notes, wide=True)


def _seconds(jobs: pd.DataFrame, kind: str) -> float | None:
    """Seconds of all jobs of a kind; None without any."""
    own = jobs[jobs.kind == kind].seconds
    return float(own.sum()) if len(own) else None


def _time_column(title: str, seconds: Sequence[float | None]) -> tuple[Column, list[Cell]]:
    """A column of times, in the unit that fits the longest of them."""
    longest = max((one for one in seconds if one is not None), default=0.0)
    unit, size = ("h", HOUR) if longest >= 3 * HOUR else ("min", 60.0) if longest >= 180 else ("s", 1.0)
    return Column(f"{title}, {unit}", "", 1), [None if one is None else Metric(one / size) for one in seconds]


def _clock(suites: Iterable[FoundSuite]) -> float | None:
    """Seconds in which at least one of the suites was running; None while one is, or if it was killed."""
    total, until = 0, 0
    for one in sorted((one.collection for one in suites), key=lambda one: one.started):
        if one.ended is None:
            return None
        total += max(0, one.ended - max(one.started, until))
        until = max(until, one.ended)
    return total / 1000


def _own_clock(one: FoundSuite, suites: Iterable[FoundSuite]) -> float | None:
    """Seconds from begin to end of a suite; None if another suite ran meanwhile."""
    spans = [(each.collection.started, each.collection.ended or math.inf) for each in suites if each is not one]
    started, ended = one.collection.started, one.collection.ended or math.inf
    return _clock([one]) if all(until <= started or ended <= since for since, until in spans) else None


def describe_cost(work: pd.DataFrame, price: float | None = None) -> list[str]:
    """What everything cost, in sentences. price: of an hour of a GPU, or of a machine without one."""
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
    return found


def list_versions(work: pd.DataFrame) -> list[tuple[str, str]]:
    """System, CUDA, source and library versions of all results; with counts where they differ."""
    counts: dict[str, Counter[str]] = {}
    for one in filter(None, drop_shared(work).environment):
        packages = one.get("packages") or {}
        git = one.get("git")
        source = f"commit {git['commit'][:12]}{' with changes' * git['dirty']}" if git else "an installed copy"
        named = {"System": one.get("platform"), "CUDA": one.get("cuda"), "Python": one.get("python"), **packages}
        for name, version in {**named, "Source": source}.items():
            if version:
                counts.setdefault(name, Counter())[str(version)] += 1
    texts = {
        name: next(iter(found))
        if len(found) == 1
        else " / ".join(f"{version} ({plural(count, 'result')})" for version, count in sorted(found.items()))
        for name, found in counts.items()
    }
    own = ("System", "CUDA", "Source")
    libraries = ", ".join(f"{name} {text}" for name, text in texts.items() if name not in own)
    rows = [(name, texts[name]) for name in own if name in texts]
    return [*rows, ("Versions", libraries)] if libraries else rows
