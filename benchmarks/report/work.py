"""What ran, on what, how long and at what cost, as tables, from what every result file recorded of its making.

A run that several suites share counts once in all sums over suites.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks.console.output import plural
from benchmarks.report.read import STATES, Found, Run
from benchmarks.results.metrics import Metric
from benchmarks.results.pictures import read_pictures
from benchmarks.tables.runtime import newest_measurement
from benchmarks.tables.table import Column, Row, Table
from runner.results import EvalResult, TrainResult

HOUR = 3600.0


@dataclass(frozen=True)
class Spent:
    """Seconds of processes: gpu of those that had one, cpu of the others, unmetered of GPUs whose power is not known.

    joules: what the others drew.
    """

    gpu: float = 0.0
    cpu: float = 0.0
    joules: float = 0.0
    unmetered: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(mine + theirs for mine, theirs in zip(_all(self), _all(other), strict=True)))

    @property
    def seconds(self) -> float:
        return self.gpu + self.cpu


def _all(spent: Spent) -> tuple[float, float, float, float]:
    return spent.gpu, spent.cpu, spent.joules, spent.unmetered


def spent_on(result: TrainResult | EvalResult) -> Spent:
    """Every process of a training counts for the whole of it; an evaluation does not record how many it had."""
    processes = max(1, len(result.ranks)) if isinstance(result, TrainResult) else 1
    seconds = result.seconds * processes
    if not result.environment.get("gpu"):
        return Spent(cpu=seconds)
    watts = result.use.gpu_watts
    return Spent(gpu=seconds, joules=(watts or 0.0) * seconds, unmetered=seconds if watts is None else 0.0)


def all_runs(found: Iterable[Found]) -> list[Run]:
    """Every run once, with the evaluations of all suites, and as far as it is in the suite that lacks most of it."""
    merged: dict[str, Run] = {}
    for run in (run for one in found for run in one.runs):
        merged[run.path] = merged[run.path].with_targets_of(run) if run.path in merged else run
    return list(merged.values())


@dataclass(frozen=True)
class Extra:
    """What a suite did besides its runs, such as a contest or pictures, in one process."""

    seconds: float
    environment: Mapping[str, Any]

    @property
    def spent(self) -> Spent:
        gpu = self.environment.get("gpu")
        return Spent(gpu=self.seconds, unmetered=self.seconds) if gpu else Spent(cpu=self.seconds)


def extra_of(one: Found) -> Extra | None:
    """As the contest or the record of the pictures has it; None where neither says how long it took."""
    # What has no runs is measured by a contest.
    made = read_pictures(one.done) if one.done.runs else newest_measurement(one.done) or {}
    return Extra(made["seconds"], made.get("environment", {})) if "seconds" in made else None


def all_extras(found: Iterable[Found]) -> list[Extra]:
    """Of every suite that has one."""
    return [extra for extra in map(extra_of, found) if extra]


def besides(found: Iterable[Found]) -> float | None:
    """Seconds of what these suites did besides their runs, None where they did nothing."""
    extras = all_extras(found)
    return sum(extra.seconds for extra in extras) if extras else None


def trained(runs: Iterable[Run]) -> list[TrainResult]:
    """The trainings; methods that train nothing have none."""
    return [run.training for run in runs if run.training and run.training.steps]


@dataclass(frozen=True)
class WorkRow:
    """A line of the table of suites. besides: seconds of what is no run; clocked: from begin to end."""

    name: str
    runs: Sequence[Run]
    besides: float | None
    clocked: float | None

    @property
    def seconds(self) -> tuple[float | None, ...]:
        """Of training, of evaluation, besides, and from begin to end."""
        training = sum(result.seconds for result in trained(self.runs))
        evaluation = sum(result.seconds for run in self.runs for result in run.evaluations)
        return training, evaluation, self.besides, self.clocked


def suites_table(found: Sequence[Found]) -> Table:
    """A line per suite and one for all: how much of it there is and how long it took."""
    rows = [WorkRow(one.suite.name, one.runs, besides([one]), own_clock(one, found)) for one in found]
    if len(found) > 1:
        rows.append(WorkRow("All, shared runs once", all_runs(found), besides(found), clock(found)))
    times = [
        Clock.of(seconds or 0.0 for seconds in column) for column in zip(*(row.seconds for row in rows), strict=True)
    ]
    lines = [
        Row(
            (row.name,),
            (
                Metric(len(row.runs)),
                Metric(sum(run.state not in STATES for run in row.runs)),
                Metric(sum(len(run.evaluations) for run in row.runs)),
                *(one.value(seconds) for one, seconds in zip(times, row.seconds, strict=True)),
            ),
            average=place == len(found),
        )
        for place, row in enumerate(rows)
    ]
    titles = ("Training", "Evaluation", "Besides", "Begin to end")
    columns = (
        *(Column(title, "", 0) for title in ("Runs", "Finished", "Evaluations")),
        *(one.column(title) for one, title in zip(times, titles, strict=True)),
    )
    notes = (
        "Training: in steps and checkpoints, summed over runs, without loading, tracking and work that was lost and "
        "repeated. Evaluation: class features, warm-up and all images. Besides: what is no run, such as a contest of "
        "speed and pictures.",
        "Begin to end: the clock between the first command and the end of the last one, with whatever lay between "
        "them; of a suite only where no other suite was at work meanwhile, as all are in one command.",
    )
    return Table(
        "report-suites",
        "Suites, their runs, and how long they took",
        ("Suite",),
        columns,
        tuple(lines),
        notes,
        wide=True,
    )


@dataclass(frozen=True)
class Clock:
    """The unit in which the times of a column are said: hours, minutes or seconds."""

    unit: str
    seconds: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Clock:
        longest = max(times, default=0.0)
        return cls("h", HOUR) if longest >= 3 * HOUR else cls("min", 60.0) if longest >= 180 else cls("s", 1.0)

    def column(self, title: str) -> Column:
        return Column(f"{title}, {self.unit}", "", 1)

    def value(self, seconds: float | None) -> Metric | None:
        return None if seconds is None else Metric(seconds / self.seconds)


def clock(found: Iterable[Found]) -> float | None:
    """Seconds in which any of the suites was at work, None while one goes on or was killed."""
    total, until = 0, 0
    for one in sorted((one.collection for one in found), key=lambda one: one.started):
        if one.ended is None:
            return None
        total += max(0, one.ended - max(one.started, until))
        until = max(until, one.ended)
    return total / 1000


def own_clock(one: Found, found: Iterable[Found]) -> float | None:
    """Seconds of the suite's commands together, None where another suite was at work meanwhile."""
    spans = [(each.collection.started, each.collection.ended or math.inf) for each in found if each is not one]
    started, ended = one.collection.started, one.collection.ended or math.inf
    return clock([one]) if all(until <= started or ended <= since for since, until in spans) else None


def machine(environment: Mapping[str, Any]) -> str:
    """What a result was made on, in words."""
    cpu = environment.get("cpu") or {}
    threads = f", {plural(cpu['threads'], 'thread')}" if cpu.get("threads") else ""
    processor = f"{cpu['name']} ({plural(cpu['cores'], 'core')}{threads})" if cpu.get("name") else "not recorded"
    return f"{environment['gpu']}, {processor}" if environment.get("gpu") else processor


def machines_table(runs: Sequence[Run], extras: Sequence[Extra]) -> Table:
    """A line per kind of machine."""
    trainings: dict[str, list[TrainResult]] = {}
    evaluations: dict[str, list[EvalResult]] = {}
    others: dict[str, float] = {}
    for training in trained(runs):
        trainings.setdefault(machine(training.environment), []).append(training)
    for evaluation in (result for run in runs for result in run.evaluations):
        evaluations.setdefault(machine(evaluation.environment), []).append(evaluation)
    for extra in extras:
        others[machine(extra.environment)] = others.get(machine(extra.environment), 0.0) + extra.seconds
    names = sorted({*trainings, *evaluations, *others})
    training_seconds = [sum(result.seconds for result in trainings.get(name, ())) for name in names]
    evaluation_seconds = [sum(result.seconds for result in evaluations.get(name, ())) for name in names]
    times = Clock.of(training_seconds), Clock.of(evaluation_seconds), Clock.of(others.values())
    lines = [
        Row(
            (name,),
            (
                Metric(len(trainings.get(name, ()))),
                times[0].value(trained_for),
                Metric(max((len(result.ranks) or 1 for result in trainings.get(name, ())), default=0)),
                Metric(len(evaluations.get(name, ()))),
                times[1].value(evaluated_for),
                times[2].value(others.get(name)),
            ),
        )
        for name, trained_for, evaluated_for in zip(names, training_seconds, evaluation_seconds, strict=True)
    ]
    columns = (
        Column("Trainings", "", 0),
        times[0].column("Training"),
        Column("Most processes", "", 0),
        Column("Evaluations", "", 0),
        times[1].column("Evaluation"),
        times[2].column("Besides"),
    )
    notes = ("Most processes: of one training. Methods that train nothing have no training.",)
    return Table("report-machines", "Machines", ("Machine",), columns, tuple(lines), notes, wide=True)


def environments(runs: Iterable[Run], extras: Sequence[Extra]) -> list[Mapping[str, Any]]:
    """Of everything that was trained, evaluated or done besides."""
    results = [*extras, *(result for run in runs for result in (run.training, *run.evaluations) if result is not None)]
    return [result.environment for result in results if result.environment]


def versions(runs: Iterable[Run], extras: Sequence[Extra]) -> list[tuple[str, str]]:
    """Which versions of what, and which states of the source, made the results; how many, where there are several."""
    counts: dict[str, Counter[str]] = {}
    for one in environments(runs, extras):
        packages = one.get("packages") or {}
        named = {"System": one.get("platform"), "CUDA": one.get("cuda"), "Python": one.get("python"), **packages}
        for name, version in {**named, "Source": _commit(one.get("git"))}.items():
            if version:
                counts.setdefault(name, Counter())[str(version)] += 1
    words = {name: _counted(found) for name, found in counts.items()}
    own = ("System", "CUDA", "Source")
    libraries = ", ".join(f"{name} {found}" for name, found in words.items() if name not in own)
    rows = [(name, words[name]) for name in own if name in words]
    return [*rows, ("Versions", libraries)] if libraries else rows


def _commit(git: Mapping[str, Any] | None) -> str:
    return f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "an installed copy"


def _counted(found: Counter[str]) -> str:
    if len(found) == 1:
        return next(iter(found))
    return " / ".join(f"{name} ({plural(count, 'result')})" for name, count in sorted(found.items()))


def cost_lines(runs: Sequence[Run], extras: Sequence[Extra], price: float | None = None) -> list[str]:
    """What everything cost, in sentences."""
    spent = sum((spent_on(result) for result in trained(runs)), Spent())
    spent += sum((spent_on(result) for run in runs for result in run.evaluations), Spent())
    spent += sum((extra.spent for extra in extras), Spent())
    lines = []
    if spent.gpu:
        lines.append(f"{spent.gpu / HOUR:.2f} GPU-hours")
    if spent.cpu or not spent.gpu:
        lines.append(f"{spent.cpu / HOUR:.2f} machine-hours without a GPU")
    hours = " and ".join(lines)
    said = [f"Training, evaluation and what was done besides took {hours}, every process of a training counted."]
    if spent.joules:
        part = (
            ""
            if not spent.unmetered
            else f" of the {(spent.gpu - spent.unmetered) / HOUR:.2f} GPU-hours it was measured in"
        )
        said.append(f"The GPUs drew {spent.joules / HOUR / 1000:.2f} kWh{part}.")
    if price is not None:
        said.append(f"At {price:g} an hour, of a GPU or a machine, that is {spent.seconds / HOUR * price:.2f}.")
    return said


def day(milliseconds: int) -> str:
    """A day of the clock, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d")
