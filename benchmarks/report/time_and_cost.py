"""Make tables of what ran, on which machines, for how long and at what cost; shared runs count once in sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.report.started_suites import StartedSuite
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
COLUMNS = ("suite", "kind", "path", "target", "seconds", "environment", "watts", "processes", "steps")


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
                    processes = run.processes
                    environment, watts = run.environment, None
                    rows.append((one.name, "train", path, "", run.seconds, environment, watts, processes, run.steps))
            for target in evaluated.get(path, ()):
                with suppress(UserError):
                    if result := folder.evaluation(Target.parse_unchecked(target), settings[path]):
                        environment, watts = result.environment, None
                        rows.append((one.name, "eval", path, target, result.seconds, environment, watts, 1, 0))
        # A suite without runs measures runtime.
        with explain_broken_report():
            other = one.results.pictures if one.results.runs or not one.is_suite else newest_measurement(one.results)
            if other and "seconds" in other:
                seconds, environment = float(other["seconds"]), other.get("environment") or {}
                describe_machine(environment)
                rows.append((one.name, "other", one.name, "", seconds, environment, None, 1, 0))
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


def work_table(jobs: pd.DataFrame) -> Table:
    """Make a row per suite and machine, and one for all: trainings and evaluations, and how long they took."""
    groups = [*jobs.groupby(["suite", "machine"], sort=False)]
    if len(groups) > 1:
        groups.append((("All, shared runs once", ""), drop_shared(jobs)))
    rows = []
    for place, (labels, own) in enumerate(groups):
        trained = own[own.kind == "train"]
        minutes = [own.seconds[own.kind == kind].sum() / 60 for kind in ("train", "eval", "other")]
        numbers = len(trained), trained.processes.max() if len(trained) else 0, (own.kind == "eval").sum(), *minutes
        cells = tuple(Metric(float(number)) for number in numbers)
        rows.append(Row(tuple(map(str, labels)), cells, average=len(groups) > 1 and place == len(groups) - 1))
    note = (
        "Training: steps and checkpoints, summed over runs, without loading, tracking, and work that was lost and "
        "repeated; methods that train nothing have none. Most processes: of one training. Evaluation: class features, "
        "warm-up and all images. Other: jobs that are not runs, such as the runtime comparison and the pictures."
    )
    counts = [Column(title, "", 0) for title in ("Trainings", "Most processes", "Evaluations")]
    times = [Column(f"{title}, min", "") for title in ("Training", "Evaluation", "Other")]
    title = "What ran, on which machines, and how long it took"
    return Table("report-work", title, ("Suite", "Machine"), [*counts, *times], rows, (note,), wide=True)


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


def describe_versions(jobs: pd.DataFrame) -> str:
    """Describe system, CUDA, source and library versions of all results, several where they differ."""
    found: dict[str, dict[str, None]] = {}
    for environment in filter(None, drop_shared(jobs).environment):
        git = environment.get("git")
        source = f"commit {git['commit'][:12]}{' with changes' * git['dirty']}" if git else "an installed copy"
        own = {name: environment.get(name.lower()) for name in ("Platform", "CUDA", "Python")}
        for name, version in {**own, "source": source, **(environment.get("packages") or {})}.items():
            if version:
                found.setdefault(name, {})[str(version)] = None
    return ", ".join(f"{name} {' / '.join(sorted(versions))}" for name, versions in found.items())
