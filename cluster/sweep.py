"""A sweep while it is carried out: configurations are chosen, become jobs, and what became of them is written down.

What is on the disk is all that is known: repeating a sweep goes on with it, wherever it was stopped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from cluster.configuration import Configuration, configure, most_epochs
from cluster.job import Job, Report, RunSpec
from cluster.launcher import Capacity
from cluster.paths import StoragePaths
from cluster.search import SCORE, as_searcher, halving, proposer_for, rungs
from cluster.space import Values, digest_of
from cluster.sweep_record import SWEEPS, SweepFolder, SweepSettings, TrialRecord
from cluster.tune_runner import Search, run_trials
from cluster.work import Work, attempt, score
from procap.errors import UserError
from runner.config import RuntimeConfig, Target
from runner.remote_results import RemoteResults
from runner.results import RunFolder
from runner.stop_signals import Interrupted
from shards.errors import DataError

logger = logging.getLogger(__name__)

ENDLESS = 10**9
MOST_REFUSED = 100
"""Configurations in a row that no run accepts, after which there are taken to be no others: time alone ends no search
for them."""
UNSEEN = "its figures are not in the results: are these one folder for all nodes?"


class Audience(Protocol):
    """Hears how the sweep goes on."""

    def begun(self, record: TrialRecord, configuration: Configuration) -> None:
        """A configuration was chosen; some of its runs may be there already."""
        ...

    def heard(self, record: TrialRecord, task: str, job: Job, report: Report) -> None:
        """A job of a configuration has started or says how it goes; `task` is its name, which no other job has."""
        ...

    def over(self, record: TrialRecord, task: str, job: Job, report: Report) -> None:
        """A job is done, has failed, or was ended before, which leaves the report at "running"."""
        ...

    def settled(self, record: TrialRecord) -> None:
        """A configuration is finished, stopped or failed."""
        ...


@dataclass
class Open:
    """A configuration that is worked on; `left` are its runs without a figure yet."""

    configuration: Configuration
    left: dict[str, RunSpec]
    figures: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class Sweep:
    """Hands out jobs and listens to what becomes of them; `records` holds all that is known, by digest."""

    def __init__(self, settings: SweepSettings, place: RuntimeConfig, folder: SweepFolder, audience: Audience) -> None:
        """Reads what is there, starts nothing. Raises UsageError for a space that cannot be searched."""
        self.settings, self.place, self.folder, self.audience = settings, place, folder, audience
        self.records = folder.trials()
        self.stopped: set[str] = set()
        """Trials that the scheduler has stopped."""
        self._store = RemoteResults.of(place)
        self._proposer = proposer_for(settings)
        self._chosen = {digest for digest, record in self.records.items() if is_over(settings, record)}
        self._again = deque(digest for digest in self.records if digest not in self._chosen)
        for digest, record in self.records.items():
            if digest in self._chosen:
                self._proposer.told(record)
        self._open: dict[str, Open] = {}
        self._queue: deque[tuple[str, Job]] = deque()
        self._tasks: dict[str, tuple[str, Job]] = {}
        self._users: dict[tuple[str, ...], list[str]] = {}
        """The configurations that a job is for, by its runs: of several where a field is varied that nobody reads."""
        self._refused = 0

    def __getstate__(self) -> dict[str, Any]:
        # Ray Tune keeps a copy of what it was given on the disk, which nobody reads.
        return {}

    @property
    def begun(self) -> int:
        """Configurations that count for this attempt, those of earlier ones that are over among them."""
        return len(self._chosen)

    @property
    def settled(self) -> int:
        """How many of these are finished, stopped or failed."""
        return len(self._chosen) - len(self._open)

    @property
    def total(self) -> int | None:
        return total_of(self.settings)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be done."""
        return self.total is not None and len(self._chosen) >= self.total

    @property
    def queued(self) -> int:
        """Jobs that wait to be handed out."""
        return len(self._queue)

    def next_task(self) -> dict[str, str] | None:
        """What the next trial is to do, as its configuration for Ray Tune; None when there is nothing more."""
        while not self._queue:
            if self.settings.trials is not None and len(self._chosen) >= self.settings.trials:
                return None
            if self._refused >= MOST_REFUSED:
                return None
            values = self.records[self._again.popleft()].values if self._again else self._proposer.ask()
            if values is None:
                return None
            if digest_of(values) not in self._chosen:
                self._begin(values)
        digest, job = self._queue.popleft()
        name = f"{digest}-{len(self._tasks)}"
        self._tasks[name] = (digest, job)
        return {"task": name, "job": job.model_dump_json()}

    def _begin(self, values: Values) -> None:
        digest = digest_of(values)
        before = self.records.get(digest)
        record = TrialRecord(number=before.number if before else len(self.records), values=values)
        self._chosen.add(digest)
        try:
            configuration = configure(self.settings, values, self.place.data)
        except (UserError, DataError) as error:
            self._refused += 1
            self._settle(digest, record.model_copy(update={"state": "failed", "why": str(error)}))
            return
        self._refused = 0
        changes = {"runs": configuration.runs, "epochs": configuration.epochs, "curve": before.curve if before else {}}
        self._write(digest, record.model_copy(update=changes))
        self._open[digest] = Open(configuration, {piece.config.path: piece for piece in configuration.pieces})
        self._push()
        self.audience.begun(self.records[digest], configuration)
        for run, piece in list(self._open[digest].left.items()):
            try:
                figure = figure_of(piece, self.place)
            except (UserError, DataError) as error:
                self._fail(digest, run, str(error))
                continue
            if figure is not None:
                self._enter(digest, run, figure)
        if digest in self._open:
            self._queue.extend((digest, job) for job in self._jobs(digest))

    def _jobs(self, digest: str) -> list[Job]:
        """What is left to be done for a configuration, but for jobs that another one has begun."""
        opened = self._open[digest]
        jobs = [Job(pieces=(piece,)) for piece in opened.left.values()]
        if self.settings.together:
            pieces, halved = opened.configuration.pieces, self.settings.stop == "asha"
            pauses = rungs(opened.configuration.epochs, self.settings.grace, self.settings.reduction)
            watched = tuple(piece.targets for piece in pieces)
            jobs = [Job(pieces=pieces, rungs=pauses if halved else (), watched=watched if halved else ())]
        for job in jobs:
            self._users.setdefault(_runs(job), []).append(digest)
        return [job for job in jobs if len(self._users[_runs(job)]) == 1]

    def started(self, trial: str, config: Mapping[str, Any]) -> None:
        self._hear(config["task"], Report())

    def reported(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        digest, job = self._tasks[config["task"]]
        record = self.records[digest]
        if len(job.pieces) == len(record.runs) and report.epoch and SCORE in report.figures:
            curve = {**record.curve, report.epoch: report.figures[SCORE]}
            for user in self._users.get(_runs(job), [digest]):
                self._write(user, self.records[user].model_copy(update={"curve": curve}))
        self._hear(config["task"], report)

    def ended(self, trial: str, config: Mapping[str, Any], report: Report) -> None:
        digest, job = self._tasks[config["task"]]
        self.audience.over(self.records[digest], config["task"], job, report)
        with _at_leisure():
            for piece in job.pieces:
                self._store.pull_run(piece.config.path, weights=False)
        if report.state in ("running", "waiting"):
            if trial in self.stopped:
                curve = self.records[digest].curve
                for user in self._users.pop(_runs(job), [digest]):
                    self._stop(user, curve)
            return
        told = report.figures.get(SCORE) if len(job.pieces) == 1 else None
        users = self._users.pop(_runs(job), [digest])
        for piece in job.pieces:
            run = piece.config.path
            for user in users:
                if report.state == "failed":
                    self._fail(user, run, report.why)
                elif (figure := figure_of(piece, self.place)) is not None or (figure := told) is not None:
                    self._enter(user, run, figure)
                else:
                    self._fail(user, run, UNSEEN)

    def _hear(self, task: str, report: Report) -> None:
        digest, job = self._tasks[task]
        self.audience.heard(self.records[digest], task, job, report)

    def _enter(self, digest: str, run: str, figure: float) -> None:
        """A run of a configuration is done; so is the configuration with the last of them."""
        opened = self._open.get(digest)
        if opened is not None and opened.left.pop(run, None) is not None:
            opened.figures[run] = figure
            self._close_if_done(digest)

    def _fail(self, digest: str, run: str, why: str) -> None:
        opened = self._open.get(digest)
        if opened is None:
            return
        # Where its runs are one job, none of them goes on.
        ended = list(opened.left) if self.settings.together else [run]
        for one in ended:
            opened.left.pop(one, None)
            opened.failures.setdefault(one, why)
        self._close_if_done(digest)

    def _close_if_done(self, digest: str) -> None:
        opened = self._open[digest]
        if opened.left:
            self._write(digest, self.records[digest].model_copy(update={"figures": dict(opened.figures)}))
            return
        del self._open[digest]
        changes: dict[str, Any] = {"figures": opened.figures, "state": "finished"}
        if opened.failures:
            run, why = next(iter(opened.failures.items()))
            named = why if run in why else f"{run}: {why}"
            changes |= {"state": "failed", "why": named, "failures": opened.failures}
        else:
            changes["figure"] = fmean(opened.figures.values())
        self._settle(digest, self.records[digest].model_copy(update=changes))

    def _stop(self, digest: str, curve: Mapping[int, float]) -> None:
        """The scheduler has given the configuration up; its figures are those of the last epoch of all its runs."""
        record, opened = self.records[digest], self._open.pop(digest)
        epoch = max(curve)
        found = {run: validated(piece, epoch, self.place) for run, piece in opened.left.items()}
        figures = opened.figures | {run: figure for run, figure in found.items() if figure is not None}
        changes = {"state": "stopped", "figure": curve[epoch], "figures": figures, "curve": dict(curve)}
        self._settle(digest, record.model_copy(update=changes))

    def _settle(self, digest: str, record: TrialRecord) -> None:
        self._write(digest, record)
        self._push()
        self._proposer.told(record)
        self.audience.settled(record)

    def _push(self) -> None:
        with _at_leisure():
            self._store.push_all(f"{SWEEPS}/{self.settings.name}")

    def _write(self, digest: str, record: TrialRecord) -> None:
        self.records[digest] = record
        self.folder.write_trial(digest, record)


def _runs(job: Job) -> tuple[str, ...]:
    return tuple(piece.config.path for piece in job.pieces)


@contextmanager
def _at_leisure() -> Iterator[None]:
    """A store that does not answer now ends no sweep: what a job came to was told, and the end sends everything."""
    try:
        yield
    except (UserError, DataError) as error:
        logger.warning("%s; the sweep goes on", error)


def is_over(settings: SweepSettings, record: TrialRecord) -> bool:
    """Whether nothing more is done for a configuration: what failed is tried again, when nobody is stopped any more
    those that were go on."""
    return record.state == "finished" or (record.state == "stopped" and settings.stop != "none")


def total_of(settings: SweepSettings) -> int | None:
    """How many configurations there will be in the end; None where only the time limits them."""
    sizes = [size for size in (settings.searched().size, settings.trials) if size is not None]
    return min(sizes) if sizes else None


def carry_out(sweep: Sweep, places: StoragePaths, room: Capacity) -> None:
    """Do everything, until there is no more or the time is up: what is unfinished then keeps its state."""
    settings, places = sweep.settings, room.places(places)
    if not room.ray:
        while (task := sweep.next_task()) is not None:
            _do_here(sweep, task, places)
        return
    scheduler = None
    if settings.stop == "asha":
        scheduler, sweep.stopped = halving(settings, most_epochs(settings, sweep.place.data), sweep.records)
    seconds = None if settings.hours is None else 3600 * settings.hours
    search = Search({}, ENDLESS, as_searcher(sweep.next_task), scheduler, seconds)
    run_trials(search, job_of, places, room.share, sweep, room.at_once, growing=room.growing)


def job_of(config: Mapping[str, Any]) -> Job:
    """The job of a trial, on the machine that carries it out."""
    return Job.model_validate_json(config["job"])


def _do_here(sweep: Sweep, task: Mapping[str, str], places: StoragePaths) -> None:
    sweep.started(task["task"], task)
    work = Work(job_of(task), places.here(), lambda report: sweep.reported(task["task"], task, report))
    sweep.ended(task["task"], task, attempt(work.do, lost=(Interrupted,)))


def figure_of(piece: RunSpec, place: RuntimeConfig) -> float | None:
    """What the evaluations of a finished run come to, None while one of them is missing."""
    folder = RunFolder(place.results / piece.config.path)
    if not folder.train_file.exists():
        return None
    training, accuracies = folder.train(), []
    for target in piece.targets:
        result = folder.evaluation(Target.recorded(target))
        if training is None or result is None or result.limit is not None:
            return None
        if result.checkpoint_sha256 != training.checkpoint_sha256:
            return None
        accuracies.append(result.accuracy)
    return score(accuracies)


def validated(piece: RunSpec, epoch: int, place: RuntimeConfig) -> float | None:
    """What a run that is under way came to at the end of `epoch`, 1-based; None where it was not looked at."""
    counts = RunFolder(place.results / piece.config.path).validation()
    found = {count.target: count.accuracy for count in counts if count.epoch == epoch - 1 and count.limit is None}
    accuracies = [found[target] for target in piece.targets if target in found]
    return score(accuracies) if len(accuracies) == len(piece.targets) else None
