"""Kill ranks of trainings with SIGKILL at random moments, repeat until they finish, and compare with no kill.

    python -m benchmarks.studies.faults                       30 seeds, two ranks each; a few minutes on two cores
    python -m benchmarks.studies.faults --seeds 3 --json      a short form, as the test suite has it

For each seed a training of a few seconds and its evaluation start on several ranks. A random rank is killed
during a stage chosen by the seed (all stages equally often); the other ranks get no signal, or a
SIGTERM at once as from torchrun. The command is then repeated, on another number of ranks, until it finishes.

Recorded as wrong: a rank that hangs or ends without a one-line reason; a result file that is ever unreadable; steps
repeated although a later checkpoint exists or was due; other few-shot
samples, steps or images than an undisturbed run of one process; loss terms or weights that differ by more than the
rounding of fp32 sums; another count of correct images of a class; a leftover file. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.console.output import show, show_json
from benchmarks.studies.faults.checks import (
    TERMS,
    WEIGHTS,
    Difference,
    Watcher,
    compare,
    count_overdue,
    find_newest_state,
)
from benchmarks.studies.faults.ranks import (
    EVALUATING,
    FINISHING,
    JOINING,
    LOADING,
    STAGES,
    START_UP,
    STEPS,
    WRITING,
    Attempt,
    ObservedRun,
)
from benchmarks.studies.faults.table import table
from runner.config import RunConfig, Target, plan_run
from runner.environment import environment, library_defaults
from runner.progress import ProgressDisplay

METHODS = ("procap", "maple")
SIZES = (1, 2, 4)
KILLABLE = (STEPS, WRITING, FINISHING, START_UP, JOINING, LOADING, EVALUATING)
# Longest random delay in seconds between the start of a stage and the kill: about the length of the stage.
WAITS = {START_UP: 0.04, JOINING: 0.06, LOADING: 0.4, STEPS: 0.1, WRITING: 0.001, FINISHING: 0.03, EVALUATING: 0.3}
EPOCHS, STEPS_PER_EPOCH = 4, 5
STATE_SECONDS = 0.3
TIMEOUT_SECONDS = 6.0
MOST_FAILURES = 3


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: the stage and rank it hit, what became of the other ranks and how many steps were lost."""

    stage: str
    rank: int
    size: int
    terminated: bool
    others_seconds: float
    lost_steps: int = 0


@dataclass
class SeedResult:
    """The result of one seed."""

    seed: int
    method: str
    sizes: list[int] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    repeated: int = 0
    looks: int = 0
    difference: Difference | None = None
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def make_config(method: str) -> RunConfig:
    """Configure a training of some 20 steps with the method's own recipe except for length, batch and optimizer.

    SGD, since AdamW turns a gradient that is nearly zero into a full step whose sign depends on rounding.
    """
    overrides = {"epochs": EPOCHS, "batch_size": 4, "optimizer": "sgd", "lr": 0.002, "warmup": "none"}
    return plan_run(method=method, dataset="digits", shots=4, overrides=overrides)


def pack_digits(root: Path) -> None:
    """Pack a part of the digit scans, which all trainings here use."""
    from shards.builtin_sources import builtin_source
    from shards.catalogue import find
    from shards.pack import pack_source

    source = builtin_source(find("digits"))
    pack_source(replace(source, counts={"train": 120, "val": 40, "test": 60}), root)


def make_run(method: str, data: Path, results: Path) -> ObservedRun:
    targets = (Target("digits", "base"), Target("digits", "novel"))
    steps = EPOCHS * STEPS_PER_EPOCH
    return ObservedRun(make_config(method), targets, data, results, steps, STATE_SECONDS, TIMEOUT_SECONDS)


def run_undisturbed(run: ObservedRun) -> None:
    """Run the reference that all others are compared with: one process without kills."""
    with Attempt(run, 1) as attempt:
        if not attempt.wait(300.0, lambda: None) or attempt.code(0) != 0:
            sys.exit(f"the undisturbed run failed: {attempt.stderr(0)}")


class Campaign:
    """Run one seed: attempts with kills, then attempts without until one finishes."""

    def __init__(self, seed: int, run: ObservedRun, processes: int) -> None:
        self.observed, self.processes = run, processes
        self.draw = random.Random(f"faults {seed}")
        self.result = SeedResult(seed, run.config.method)
        self.watcher = Watcher(run, self.result.wrong)
        self.stages = [KILLABLE[seed % len(KILLABLE)]]
        if self.draw.random() < 0.5:
            self.stages.append(self.draw.choice(KILLABLE))
        # The last step that was done so far; it may not be in a checkpoint.
        self._reached = 0

    def run(self, reference: ObservedRun) -> SeedResult:
        began, result = time.monotonic(), self.result
        for stage in self.stages:
            self._attempt(stage)
        failures = 0
        while not self._attempt(None):
            failures += 1
            if failures == MOST_FAILURES:
                result.wrong.append(f"does not finish: {result.unasked[-1]}")
                break
        else:
            result.difference = compare(reference, self.observed, result.wrong)
        result.looks, result.seconds = self.watcher.looks, time.monotonic() - began
        return result

    def _attempt(self, stage: int | None) -> bool:
        """Run the command once more; returns whether it finished."""
        result, draw = self.result, self.draw
        size = self.processes if not result.sizes else draw.choice(SIZES)
        result.sizes.append(size)
        kept = find_newest_state(self.observed.folder)
        with Attempt(self.observed, size) as attempt:
            killed = None if stage is None else self._strike(attempt, stage)
            terminated, began = killed is not None and draw.random() < 0.5, time.monotonic()
            if terminated:
                for rank in attempt.alive():
                    attempt.signal(rank, signal.SIGTERM)
            if not attempt.wait(TIMEOUT_SECONDS + 60.0, self.watcher.look):
                result.wrong.append(f"rank {attempt.alive()} of {size} hung: {killed}")
            seconds = time.monotonic() - began
            self.watcher.look(at_once=True)
            self._follow_up(attempt, kept)
            codes = [attempt.code(rank) for rank in range(size)]
            outputs = [attempt.stderr(rank) for rank in range(size)]
            if killed is not None:
                rank, hit = killed
                lost = self._reached - find_newest_state(self.observed.folder) if hit <= WRITING else 0
                result.kills.append(Kill(STAGES[hit], rank, size, terminated, seconds, max(lost, 0)))
                others = [(codes[r], outputs[r]) for r in range(size) if r != rank]
                result.wrong += [_describe_end(STAGES[hit], end) for end in others if _is_unclear(end, terminated)]
                return False
        if any(codes):
            result.unasked += [text.strip() for text in outputs if text.strip()] or [f"exit codes {codes}"]
            result.wrong += [f"{text!r}" for text in outputs if "internal error" in text or "Traceback" in text]
            return False
        return True

    def _strike(self, attempt: Attempt, stage: int) -> tuple[int, int] | None:
        """Kill a rank in a stage; returns the rank and its stage, None if it had ended before."""
        draw = self.draw
        rank = draw.randrange(attempt.size)
        if stage == WRITING and draw.random() < 0.75:
            rank = 0
        after = (
            self._reached + draw.random() * (self.observed.steps - 1 - self._reached)
            if stage in (STEPS, WRITING)
            else 0
        )
        while (now := attempt.stage(rank)) < stage or (stage in (STEPS, WRITING) and attempt.signs.reached() < after):
            if attempt.code(rank) is not None or (stage == WRITING and now > WRITING):
                break
            self.watcher.look()
            time.sleep(0.0003 if stage == WRITING else 0.002)
        time.sleep(draw.uniform(0, WAITS[stage]))
        if attempt.code(rank) is not None:
            return None
        attempt.signal(rank, signal.SIGKILL)
        return rank, attempt.stage(rank)

    def _follow_up(self, attempt: Attempt, kept: int) -> None:
        """Check which state an attempt resumed from, and whether it saved its own in time."""
        result, run = self.result, self.observed
        resumed = attempt.signs.resumed_from()
        if resumed is None:
            return
        if resumed != kept:
            result.wrong.append(f"went on from step {resumed}, the newest state was of step {kept}")
        result.repeated += max(self._reached - resumed, 0)
        self._reached = attempt.signs.reached()
        late = count_overdue(run, attempt.signs)
        if late:
            result.wrong.append(f"{late} steps were done after a state was due")


def _is_unclear(end: tuple[int | None, str], terminated: bool) -> bool:
    """Whether a rank that was not killed ended without a one-line reason."""
    code, stderr = end
    if "internal error" in stderr or "Traceback" in stderr or stderr.count("\n") > 1:
        return True
    if terminated:
        return code not in (0, 1, 128 + signal.SIGTERM, -signal.SIGTERM)
    # If the run was already finished when the rank was killed, the others end with 0.
    return not (code == 0 or (code == 1 and ("no answer from" in stderr or "could not connect to" in stderr)))


def _describe_end(stage: str, end: tuple[int | None, str]) -> str:
    """Describe an unclear end in one line, as a rank may print long tracebacks."""
    code, stderr = end
    lines = stderr.strip().splitlines() or [""]
    return f"after a kill during {stage} a rank ended with {code} and {len(lines)} lines, the last: {lines[-1]}"


def campaign(seeds: int, processes: int, *, note: str = "", quiet: bool = False) -> dict[str, Any]:
    """Run all seeds, one after the other; returns the report."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as root,
        ProgressDisplay("faults", seeds, unit="seeds", quiet=quiet) as display,
    ):
        folder = Path(root)
        data = folder / "data"
        pack_digits(data)
        methods = METHODS[:seeds]
        references = {method: make_run(method, data, folder / "undisturbed") for method in methods}
        for run in references.values():
            run_undisturbed(run)
        results = []
        for seed in range(seeds):
            method = methods[seed % len(methods)]
            run = make_run(method, data, folder / f"seed-{seed}")
            results.append(Campaign(seed, run, processes).run(references[method]))
            killed = sum(len(result.kills) for result in results)
            display.update(len(results), kills=killed, wrong=sum(len(result.wrong) for result in results))
    return {
        "command": f"python -m benchmarks.studies.faults --seeds {seeds} --processes {processes}",
        "note": note,
        "seconds": round(time.monotonic() - began, 1),
        "environment": environment(),
        "steps": EPOCHS * STEPS_PER_EPOCH,
        "state_seconds": STATE_SECONDS,
        "timeout_seconds": TIMEOUT_SECONDS,
        "sizes": SIZES,
        "tolerance": {"weights": WEIGHTS, "terms": TERMS},
        "wrong": sum(len(result.wrong) for result in results),
        "seeds": [asdict(result) for result in results],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the campaign, print the table; returns 1 if anything was wrong."""
    library_defaults()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=30, help="3 for a quick look")
    parser.add_argument("--processes", type=int, default=2, choices=SIZES, help="of the first start of each seed")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout, and no table")
    parser.add_argument("--out", type=Path, help="also write the report to this .json file, and the table beside it")
    parser.add_argument("--note", default="", help="a remark kept in the record")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error("seeds must be at least 1")
    from runner.results import write_bytes, write_json

    report = campaign(arguments.seeds, arguments.processes, note=arguments.note)
    if arguments.out:
        write_json(arguments.out, report)
        write_bytes(arguments.out.with_suffix(".md"), f"{table(report)}\n".encode())
    if arguments.json:
        show_json(report)
    else:
        show(table(report))
    return 1 if report["wrong"] else 0
