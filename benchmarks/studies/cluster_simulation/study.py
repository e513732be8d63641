"""What is simulated of the paper's Table 1: how long its runs are on two guesses at a GPU, cluster sizes, failures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cost.estimate import START_SECONDS, CostModel
from benchmarks.cost.pace import Machine
from benchmarks.results.profiles import PAPER
from benchmarks.studies.cluster_simulation.cluster import (
    MTBF_HOURS,
    PER_NODE,
    SIZES,
    Conditions,
    Job,
    Outcome,
    outcomes_by_size,
    simulate,
    spread,
)
from benchmarks.suites import suite_named
from procap.errors import UsageError
from runner.config import RunConfig, Target, plan_run

DATASETS, TABLE = PAPER.datasets, suite_named("base-to-novel")
METHODS, SEEDS = TABLE.methods, TABLE.seeds
FAILING = (24.0, 168.0, 1000.0)
"""Hours between failures of a node, beside what was asked for: machines lent by the day, by the week, and poor ones."""
WIDTHS = (1, 2, 4, 8)
MOST = 1e9
"""Of any duration and price; what is longer says no more."""


@dataclass(frozen=True)
class Case:
    """A guess at how fast a GPU is."""

    name: str
    what: str
    model: CostModel


def cases(start: float | None = None) -> list[Case]:
    """The two guesses between which a GPU is expected, as long as nobody has measured one; start: of every attempt."""
    fast = CostModel(Machine("H200", "cuda"), start=start)
    sheets = {gpu["name"]: gpu for gpu in fast.paces.figures["accelerators"]}
    h200, published = sheets["H200"], fast.paces.figures["published"]
    slow = published["flops"] / sheets["A100"]["flops"]
    return [
        Case(
            "H200, counted",
            f"ASSUMED: counted operations at {h200['reached']:.0%} of an H200's {h200['flops'] / 1e12:.0f} TFLOP/s, no "
            f"step below {1e6 * h200['replay']:.0f} us for each of its operations, as in scaling.md",
            fast,
        ),
        Case(
            "A100, published",
            f"counted operations at {published['flops'] / 1e12:.1f} TFLOP/s, {slow:.1%} of an A100's peak: what the "
            "training seconds let expect that the paper's authors MEASURED with their own code on an A100, median of "
            "four (runtime.csv); that methods and data sets other than these go at the same rate is ASSUMED",
            CostModel(Machine("A100", "cuda"), reached=slow, start=start),
        ),
    ]


def configs() -> list[RunConfig]:
    """Every run of Table 1: trained on base classes by its own recipe."""
    return [
        plan_run(method=method, dataset=dataset, seed=seed, backbone="ViT-B-16", precision="bf16")
        for dataset in DATASETS
        for method in METHODS
        for seed in SEEDS
    ]


def job(model: CostModel, config: RunConfig, gpus: int = 1) -> Job:
    """A run, evaluated on base and novel classes."""
    one = model.estimate(config, [Target(config.dataset, half) for half in ("base", "novel")], ranks=gpus)
    return Job(one.training, one.evaluations, gpus, one.start)


def widened(model: CostModel, runs: Sequence[RunConfig], gpus: int) -> list[Job]:
    """The runs on a GPU each, but the longest on several where that ends them sooner and GPUs are left.

    A batch is dealt out evenly or not at all, so that CoCoOp's single images keep it on one GPU.
    """
    jobs = [job(model, config) for config in runs]
    while True:
        number = max(range(len(jobs)), key=lambda one: jobs[one].seconds)
        config, now = runs[number], jobs[number]
        wider = [width for width in WIDTHS if width > now.gpus and config.recipe.batch_size % width == 0]
        options = [option for option in (job(model, config, width) for width in wider) if option.seconds < now.seconds]
        options = [one for one in options if sum(other.gpus for other in jobs) - now.gpus + one.gpus <= gpus]
        if not options:
            return jobs
        jobs[number] = options[0]


def study(flags: argparse.Namespace) -> dict[str, Any]:
    """Everything that was simulated, as JSON. Raises UsageError for flags that cannot be."""
    sizes = _sizes(flags)
    given = Conditions(
        per_node=flags.gpus_per_node,
        mtbf_hours=flags.mtbf_hours or None,
        replace=flags.replace,
    )
    runs, found = configs(), []
    for case in cases(flags.start):
        jobs = [job(case.model, config) for config in runs]
        ordered = sorted(jobs, key=lambda one: -one.seconds)
        outcomes = outcomes_by_size(ordered, sizes, given, flags.seeds)
        found.append(
            {
                "name": case.name,
                "what": case.what,
                "runs": len(jobs),
                "gpu_hours": sum(one.seconds + one.start for one in jobs) / 3600,
                "lengths": _lengths(runs, jobs),
                "sizes": [_row(outcomes[gpus], flags.price) for gpus in sizes],
                "as_listed": [simulate(jobs, gpus, replace(given, mtbf_hours=None)).makespan for gpus in sizes],
                "failing": _failing(ordered, sizes[-1], given, flags),
                "widened": [_widened(case.model, runs, sizes[-1], given, left_out) for left_out in ((), ("cocoop",))],
            }
        )
    return {
        "command": _command(flags),
        "conditions": {"start": flags.start, **asdict(given)},
        "price": flags.price,
        "seeds": flags.seeds,
        "cases": found,
    }


def _sizes(flags: argparse.Namespace) -> list[int]:
    try:
        sizes = sorted({int(one) for one in flags.gpus.split(",")})
    except ValueError:
        raise UsageError(f"--gpus {flags.gpus}: numbers with commas between, as in 1,8,64") from None
    wrong = {"--gpus": sizes[0], "--gpus-per-node": flags.gpus_per_node, "--seeds": flags.seeds}
    for name, value in wrong.items():
        if value < 1:
            raise UsageError(f"{name} {value}: at least 1 is needed")
    for name in ("mtbf_hours", "replace", "start", "price"):
        if not 0 <= (value := getattr(flags, name)) <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: a number from 0 to {MOST:,.0f} is needed")
    return sizes


def flags_parser() -> argparse.ArgumentParser:
    """The flags of the command, which decide what is simulated."""
    parser = argparse.ArgumentParser(description="The paper's Table 1 on clusters of 1 to 512 GPUs, simulated.")
    parser.add_argument("--gpus", default=",".join(map(str, SIZES)))
    parser.add_argument("--gpus-per-node", type=int, default=PER_NODE)
    parser.add_argument("--mtbf-hours", type=float, default=MTBF_HOURS, help="of a node; 0: nodes never fail")
    parser.add_argument("--replace", type=float, default=600.0, help="seconds until a lost node is replaced")
    parser.add_argument(
        "--start", type=float, default=START_SECONDS["cuda"], help="seconds of every attempt at a run before it works"
    )
    parser.add_argument("--price", type=float, default=4.0, help="of a GPU's hour, in any currency")
    parser.add_argument("--seeds", type=int, default=200, help="simulations of each case")
    parser.add_argument("--out", type=Path, help="folder of cluster.md, cluster.json and the figure; default: none")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON on stdout")
    return parser


def _command(flags: argparse.Namespace) -> str:
    defaults = vars(flags_parser().parse_args([]))
    names = ("gpus_per_node", "mtbf_hours", "replace", "start", "price", "seeds")
    given = [f"--{name.replace('_', '-')} {getattr(flags, name):g}" for name in names
             if getattr(flags, name) != defaults[name]]  # fmt: skip
    sizes = [f"--gpus {flags.gpus}"] if flags.gpus != defaults["gpus"] else []
    return " ".join(["python -m benchmarks.studies.cluster_simulation", *sizes, *given])


def _lengths(runs: Sequence[RunConfig], jobs: Sequence[Job]) -> dict[str, dict[str, float]]:
    """Seconds of a run, its start included, by method and data set; seeds are alike."""
    found: dict[str, dict[str, float]] = {}
    for config, one in zip(runs, jobs, strict=True):
        found.setdefault(config.method, {})[config.dataset] = one.seconds + one.start
    return found


def _row(outcomes: Sequence[Outcome], price: float) -> dict[str, Any]:
    mean, deviation = spread([one.makespan for one in outcomes])
    hours = spread([one.gpu_hours for one in outcomes])[0]
    return {
        "gpus": outcomes[0].gpus,
        "seconds": mean,
        "deviation": deviation,
        "lowest": min(one.makespan for one in outcomes),
        "highest": max(one.makespan for one in outcomes),
        "floor": outcomes[0].floor,
        "gpu_hours": hours,
        "cost": hours * price,
        "utilisation": spread([one.utilisation for one in outcomes])[0],
        "failures": spread([one.failures for one in outcomes])[0],
        "struck": spread([one.struck for one in outcomes])[0],
        "lost_gpu_seconds": spread([one.lost for one in outcomes])[0],
    }


def _failing(jobs: Sequence[Job], gpus: int, given: Conditions, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """More failures, on few GPUs and on the most."""
    hours = sorted({*FAILING, *([given.mtbf_hours] if given.mtbf_hours else [])})

    def failing(size: int, mtbf: float) -> list[Outcome]:
        return outcomes_by_size(jobs, [size], replace(given, mtbf_hours=mtbf), flags.seeds)[size]

    return [
        {"mtbf_hours": mtbf, **_row(failing(size, mtbf), flags.price)}
        for size in sorted({min(8, gpus), gpus})
        for mtbf in hours
    ]


def _widened(
    model: CostModel, runs: Sequence[RunConfig], gpus: int, given: Conditions, left_out: Sequence[str]
) -> dict[str, Any]:
    """What several GPUs for the longest runs gain on `gpus` GPUs, when nothing fails."""
    runs = [config for config in runs if config.method not in left_out]
    calm = replace(given, mtbf_hours=None)

    def best(jobs: Sequence[Job]) -> Outcome:
        ordered: list[Job] = sorted(jobs, key=lambda one: -one.seconds)
        return simulate(ordered, gpus, calm)

    wide = widened(model, runs, gpus)
    longest = max(runs, key=lambda config: job(model, config).seconds)
    one, two = job(model, longest), job(model, longest, 2) if longest.recipe.batch_size % 2 == 0 else None
    return {
        "gpus": gpus,
        "left_out": list(left_out),
        "longest": f"{longest.method} on {longest.dataset}",
        "longest_seconds": [one.seconds + one.start, two and two.seconds + two.start],
        "seconds": best([job(model, config) for config in runs]).makespan,
        "widened_seconds": best(wide).makespan,
        "widened_runs": sum(one.gpus > 1 for one in wide),
    }
