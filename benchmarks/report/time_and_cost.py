"""Make tables of what ran, on which machines, for how long and at what cost; shared runs count once in sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.report.started_suites import StartedSuite, merge_unfinished
from benchmarks.results.metrics import Metric
from benchmarks.results.runtime import explain_broken_report
from benchmarks.tables.runtime import newest_measurement
from benchmarks.tables.table import Column, Row, Table
from procap.errors import UserError
from runner.config import Target
from runner.progress import format_duration
from runner.run_folders import RunFolder

if TYPE_CHECKING:
    import pandas as pd

HOUR = 3600.0
COLUMNS = ("suite", "kind", "path", "target", "seconds", "environment", "watts", "processes")
KINDS = {"train": "Training", "eval": "Evaluation", "other": "Other"}


@explain_broken_report()
def read_jobs(suites: Iterable[StartedSuite]) -> pd.DataFrame:
    """Read one row per suite and training (`kind` train), evaluation (eval) or further job (other: runtime)."""
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    for one in suites:
        evaluated = one.results.frame.groupby("path").target.unique().to_dict()
        settings = {run.path: one.results.options.eval_settings.for_run(run.spec.config) for run in one.results.runs}
        for path in one.results.paths:
            folder = RunFolder(one.results.results / path)
            # Unreadable files are listed as problems of their run.
            with suppress(UserError):
                if (run := folder.train()) and run.steps:
                    processes = max(1, len(run.ranks))
                    environment, watts = run.environment, run.use.gpu_watts
                    rows.append((one.name, "train", path, "", run.seconds, environment, watts, processes))
            for target in evaluated.get(path, ()):
                with suppress(UserError):
                    if result := folder.evaluation(Target.parse_unchecked(target), settings[path]):
                        environment, watts = result.environment, result.use.gpu_watts
                        rows.append((one.name, "eval", path, target, result.seconds, environment, watts, 1))
        # A suite without runs measures runtime.
        other = one.results.pictures if one.results.runs or not one.is_suite else newest_measurement(one.results) or {}
        if "seconds" in other:
            rows.append((one.name, "other", one.name, "", other["seconds"], other.get("environment") or {}, None, 1))
    jobs = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"watts": float, "seconds": float})
    gpus = [bool(environment.get("gpu")) for environment in jobs.environment]
    return jobs.assign(gpu=pd.array(gpus, bool), machine=list(map(describe_machine, jobs.environment)))


def drop_shared(jobs: pd.DataFrame) -> pd.DataFrame:
    """Return the jobs of all suites, each once."""
    return jobs.drop_duplicates(["kind", "path", "target"])


def describe_machine(environment: Mapping[str, Any]) -> str:
    """Name GPU and processor, as a result recorded them."""
    cpu = environment.get("cpu") or {}
    threads = f", {plural(cpu['threads'], 'thread')}" if cpu.get("threads") else ""
    processor = f"{cpu['name']} ({plural(cpu['cores'], 'core')}{threads})" if cpu.get("name") else "not recorded"
    return f"{environment['gpu']}, {processor}" if environment.get("gpu") else processor


def suites_table(suites: Sequence[StartedSuite], jobs: pd.DataFrame) -> Table:
    """Make a row per suite and one for all: number of runs and evaluations, and how long they took."""
    groups = [(one.name, one.results.paths, one.unfinished, jobs[jobs.suite == one.name]) for one in suites]
    if len(suites) > 1:
        paths = list(dict.fromkeys(path for one in suites for path in one.results.paths))
        groups.append(("All, shared runs once", paths, tuple(merge_unfinished(suites)), drop_shared(jobs)))
    rows = [
        (name, (len(paths), len(paths) - len(unfinished), (own.kind == "eval").sum()), own)
        for name, paths, unfinished, own in groups
    ]
    note = (
        "Training: steps and checkpoints, summed over runs, without loading, tracking, and work that was lost and "
        "repeated. Evaluation: class features, warm-up and all images. Other: jobs that are not runs, such as the "
        "runtime comparison and the qualitative pictures."
    )
    titles = ("Suite", "Runs", "Finished", "Evaluations")
    return _time_table("report-suites", "Suites, their runs, and how long they took", titles, rows, len(suites), note)


def machines_table(jobs: pd.DataFrame) -> Table:
    """Make a row per kind of machine."""
    rows = []
    for name, own in drop_shared(jobs).groupby("machine"):
        trained = own[own.kind == "train"]
        most = trained.processes.max() if len(trained) else 0
        rows.append((str(name), (len(trained), most, (own.kind == "eval").sum()), own))
    note = "Most processes: of one training. Methods that train nothing have no training."
    titles = ("Machine", "Trainings", "Most processes", "Evaluations")
    return _time_table("report-machines", "Machines", titles, rows, len(rows), note)


def _time_table(
    name: str,
    title: str,
    titles: Sequence[str],
    groups: Sequence[tuple[str, tuple[int, ...], pd.DataFrame]],
    parts: int,
    note: str,
) -> Table:
    """Make a row per group of jobs: its name, counts, and times, each column in the unit that fits its longest.

    titles: of the name and the counts. parts: number of rows before one for all of them.
    """
    columns = [Column(count, "", 0) for count in titles[1:]]
    cells: list[list[Metric | None]] = [[Metric(float(count)) for count in counts] for _, counts, _ in groups]
    for kind, heading in KINDS.items():
        seconds = [float(own.seconds[own.kind == kind].sum()) for *_, own in groups]
        longest = max(seconds, default=0.0)
        unit, size = ("h", HOUR) if longest >= 3 * HOUR else ("min", 60.0) if longest >= 180 else ("s", 1.0)
        columns.append(Column(f"{heading}, {unit}", "", 1))
        for row, one in zip(cells, seconds, strict=True):
            row.append(Metric(one / size) if one or kind != "other" else None)
    rows = [
        Row((label,), tuple(row), average=number == parts)
        for number, ((label, *_), row) in enumerate(zip(groups, cells, strict=True))
    ]
    return Table(name, title, (titles[0],), tuple(columns), tuple(rows), (note,), wide=True)


def describe_cost(jobs: pd.DataFrame, price: float | None = None) -> list[str]:
    """Describe in sentences what everything cost. price: of an hour of a GPU, or of a machine without one."""
    jobs = drop_shared(jobs)
    hours = jobs.seconds * jobs.processes / HOUR
    gpu, cpu, metered = hours[jobs.gpu].sum(), hours[~jobs.gpu].sum(), hours[jobs.gpu & jobs.watts.notna()].sum()
    parts = [f"{format_duration(gpu * HOUR)} of GPU time"] if gpu else []
    if cpu or not gpu:
        parts.append(f"{format_duration(cpu * HOUR)} of machine time without a GPU")
    sentences = [
        f"Training, evaluation and other jobs took {' and '.join(parts)}, counting every process of a training."
    ]
    if metered:
        of = "" if metered == gpu else f" in the {format_duration(metered * HOUR)} of GPU time where it was measured"
        sentences.append(f"The GPUs drew {(hours * jobs.watts)[jobs.gpu].sum() / 1000:.2f} kWh{of}.")
    if price is not None:
        sentences.append(f"At {price:g} an hour, of a GPU or a machine, that is {hours.sum() * price:.2f}.")
    return sentences


def list_versions(jobs: pd.DataFrame) -> list[tuple[str, str]]:
    """List system, CUDA, source and library versions of all results, with several where they differ."""
    versions: dict[str, set[str]] = {"System": set(), "CUDA": set(), "Source": set()}
    libraries: dict[str, set[str]] = {}
    for environment in filter(None, drop_shared(jobs).environment):
        git = environment.get("git")
        source = f"commit {git['commit'][:12]}{' with changes' * git['dirty']}" if git else "an installed copy"
        own = {"System": environment.get("platform"), "CUDA": environment.get("cuda"), "Source": source}
        for name, version in own.items():
            versions[name] |= {str(version)} if version else set()
        for name, version in {"Python": environment.get("python"), **(environment.get("packages") or {})}.items():
            libraries.setdefault(name, set()).update({str(version)} if version else set())
    texts = {name: " / ".join(sorted(numbers)) for name, numbers in versions.items()}
    listed = [f"{name} {' / '.join(sorted(numbers))}" for name, numbers in libraries.items() if numbers]
    texts["Versions"] = ", ".join(listed)
    return [(name, text) for name, text in texts.items() if text]
