"""What the cluster simulation tells of the paper's Table 1: run lengths, cluster sizes, failures; tables and a figure."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cluster_simulation import Conditions, Job, Outcome, duration, outcomes_by_size, simulate, spread
from benchmarks.cost import CostModel
from benchmarks.cost_pace import Machine
from procap.errors import UsageError
from runner.config import RunConfig, Target, plan_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DATASETS = (
    "imagenet", "caltech101", "oxford-pets", "stanford-cars", "oxford-flowers", "food101", "fgvc-aircraft", "sun397",
    "dtd", "eurosat", "ucf101",
)  # fmt: skip
METHODS, SEEDS = ("zeroshot", "coop", "cocoop", "maple", "procap"), (1, 2, 3)
FAILING = (24.0, 168.0, 1000.0)
"""Hours between failures of a node, beside what was asked for: machines lent by the day, by the week, and poor ones."""
WIDTHS = (1, 2, 4, 8)
COLOURS = ("#0072b2", "#d55e00")


@dataclass(frozen=True)
class Case:
    """A guess at how fast a GPU is."""

    name: str
    what: str
    model: CostModel


def cases() -> list[Case]:
    """The two guesses between which a GPU is expected, as long as nobody has measured one."""
    fast = CostModel(Machine("H200", "cuda"))
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
            CostModel(Machine("A100", "cuda"), reached=slow),
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
    """A run without its start, evaluated on base and novel classes."""
    first = model.estimate(config, ranks=gpus)
    tests = [Target(config.dataset, half) for half in ("base", "novel")]
    each = [model.estimate(config, [test], train=False, ranks=gpus) for test in tests]
    return Job(first.seconds - first.start, tuple(one.seconds - one.start for one in each), gpus)


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


def study(flags: Namespace) -> dict[str, Any]:
    """Everything that was simulated, as JSON. Raises UsageError for flags that cannot be."""
    sizes = _sizes(flags)
    given = Conditions(
        per_node=flags.gpus_per_node,
        mtbf_hours=flags.mtbf_hours or None,
        start=flags.start,
        replace=flags.replace,
    )
    runs, found = configs(), []
    for case in cases():
        jobs = [job(case.model, config) for config in runs]
        ordered = sorted(jobs, key=lambda one: -one.seconds)
        outcomes = outcomes_by_size(ordered, sizes, given, flags.seeds)
        found.append(
            {
                "name": case.name,
                "what": case.what,
                "runs": len(jobs),
                "gpu_hours": sum(one.seconds + given.start for one in jobs) / 3600,
                "lengths": _lengths(runs, jobs, given.start),
                "sizes": [_row(outcomes[gpus], flags.price) for gpus in sizes],
                "as_listed": [simulate(jobs, gpus, replace(given, mtbf_hours=None)).makespan for gpus in sizes],
                "failing": _failing(ordered, sizes[-1], given, flags),
                "widened": [_widened(case.model, runs, sizes[-1], given, left_out) for left_out in ((), ("cocoop",))],
            }
        )
    return {
        "command": _command(flags),
        "conditions": asdict(given),
        "price": flags.price,
        "seeds": flags.seeds,
        "cases": found,
    }


def _sizes(flags: Namespace) -> list[int]:
    try:
        sizes = sorted({int(one) for one in flags.gpus.split(",")})
    except ValueError:
        raise UsageError(f"--gpus {flags.gpus}: numbers with commas between, as in 1,8,64") from None
    wrong = {"--gpus": sizes[0], "--gpus-per-node": flags.gpus_per_node, "--seeds": flags.seeds}
    for name, value in wrong.items():
        if value < 1:
            raise UsageError(f"{name} {value}: at least 1 is needed")
    for name, seconds in (("--mtbf-hours", flags.mtbf_hours), ("--replace", flags.replace), ("--start", flags.start)):
        if seconds < 0:
            raise UsageError(f"{name} {seconds}: 0 or more")
    return sizes


def _command(flags: Namespace) -> str:
    defaults = {"gpus_per_node": 8, "mtbf_hours": 6000.0, "replace": 600.0, "start": 40.0, "price": 4.0, "seeds": 30}
    given = [f"--{name.replace('_', '-')} {getattr(flags, name):g}" for name, value in defaults.items()
             if getattr(flags, name) != value]  # fmt: skip
    return " ".join(["python -m benchmarks.cluster_simulation", *given])


def _lengths(runs: Sequence[RunConfig], jobs: Sequence[Job], start: float) -> dict[str, dict[str, float]]:
    """Seconds of a run, its start included, by method and data set; seeds are alike."""
    found: dict[str, dict[str, float]] = {}
    for config, one in zip(runs, jobs, strict=True):
        found.setdefault(config.method, {})[config.dataset] = one.seconds + start
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


def _failing(jobs: Sequence[Job], gpus: int, given: Conditions, flags: Namespace) -> list[dict[str, Any]]:
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
        return simulate(sorted(jobs, key=lambda one: -one.seconds), gpus, calm)

    wide = widened(model, runs, gpus)
    longest = max(runs, key=lambda config: job(model, config).seconds)
    one, two = job(model, longest), job(model, longest, 2) if longest.recipe.batch_size % 2 == 0 else None
    return {
        "gpus": gpus,
        "left_out": list(left_out),
        "longest": f"{longest.method} on {longest.dataset}",
        "longest_seconds": [one.seconds + given.start, two and two.seconds + given.start],
        "seconds": best([job(model, config) for config in runs]).makespan,
        "widened_seconds": best(wide).makespan,
        "widened_runs": sum(one.gpus > 1 for one in wide),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    given = report["conditions"]
    mtbf = given["mtbf_hours"]
    first = report["cases"][0]
    lines = [
        "# The paper's Table 1 on 1 to 512 GPUs: a simulation, not a measurement",
        "",
        f"{first['runs']} runs: {len(DATASETS)} data sets x {', '.join(METHODS)} x seeds {', '.join(map(str, SEEDS))}, "
        "ViT-B/16, bf16, trained on the base classes of 16 shots by the methods' own recipes, tested on base and novel "
        "classes. NO GPU WAS MEASURED BY THIS PROGRAM YET; two guesses at how fast one is:",
        "",
        *(f"- **{case['name']}**: {case['what']}." for case in report["cases"]),
        "",
        f"    {report['command']}",
        "",
        f"Makespan is mean ± standard deviation of {report['seeds']} simulations; floor: all work and starts evenly over "
        "the GPUs, or the longest run; used: share of the rented GPU-hours in which work was done that counted.",
    ]
    for case in report["cases"]:
        lines += [
            "",
            f"## {case['name']}: {case['gpu_hours']:.1f} GPU-hours of work and starts",
            "",
            "| GPUs | makespan | floor | above floor | GPU-hours | cost | used | not sorted |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row, listed in zip(case["sizes"], case["as_listed"], strict=True):
            shown = duration(row["seconds"]) + (f" ± {duration(row['deviation'])}" if row["deviation"] >= 0.5 else "")
            lines.append(
                f"| {row['gpus']} | {shown} | {duration(row['floor'])} | {row['seconds'] / row['floor'] - 1:.1%} | "
                f"{row['gpu_hours']:.1f} | {row['cost']:,.0f} | {row['utilisation']:.0%} | {duration(listed)} |"
            )
        lines += ["", *_lengths_table(case), "", *_failing_table(case), "", *map(_wider, case["widened"])]
    return "\n".join(
        [
            *lines,
            "",
            "## Assumptions",
            "",
            "- measured, on processors: what decoding costs (loader.json; 12 threads decode beside a GPU). Counted: the "
            "operations of every step and evaluation (`benchmarks.flops`). Everything else of a GPU is assumed, above.",
            f"- assumed: {given['start']:g} s from the start of an attempt to its first step (libraries, weights, "
            f"compiling from a kept cache), {given['hand_out']:g} s of the driver for each attempt, one after another.",
            "- runs begin in the order of the list, long ones first; `not sorted` is the same without failures in the "
            "order data set, method, seed. Nothing is known of images that wait for a network or a disk.",
            f"- a node of {given['per_node']} GPUs fails "
            + ("never" if mtbf is None else f"every {mtbf:,.0f} hours on average, independently of time and of others")
            + f"; it is noticed after {given['notice']:g} s and replaced after {given['replace']:g} s. A training is "
            f"saved every {given['checkpoint']:g} s, an evaluation not at all. (Llama 3's training lost 419 times a part "
            "of 16,384 GPUs in 54 days: 6,300 hours for each 8.)",
            f"- all GPUs are paid until the last run has ended, {report['price']:g} an hour: a number to multiply, no "
            "offer.",
            "",
            "![makespan over GPUs](cluster.png)",
            "",
        ]
    )


def _lengths_table(case: dict[str, Any]) -> list[str]:
    return [
        "Seconds of a run, its start included:",
        "",
        f"| | {' | '.join(DATASETS)} |",
        f"| --- |{' ---: |' * len(DATASETS)}",
        *(
            f"| {method} | {' | '.join(f'{found[name]:,.0f}' for name in DATASETS)} |"
            for method, found in case["lengths"].items()
        ),
    ]


def _failing_table(case: dict[str, Any]) -> list[str]:
    return [
        "When nodes fail more often:",
        "",
        "| GPUs | hours between failures of a node | makespan | longest | nodes lost | runs struck | GPU-minutes lost | "
        "used |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row['gpus']} | {row['mtbf_hours']:,.0f} | {duration(row['seconds'])} ± {duration(row['deviation'])} | "
            f"{duration(row['highest'])} | {row['failures']:.2f} | {row['struck']:.2f} | "
            f"{row['lost_gpu_seconds'] / 60:.1f} | {row['utilisation']:.0%} |"
            for row in case["failing"]
        ),
    ]


def _wider(one: dict[str, Any]) -> str:
    alone, two = one["longest_seconds"]
    without = f" without {', '.join(one['left_out'])}" if one["left_out"] else ""
    on_two = "cannot be dealt out, its batch is one image" if two is None else f"takes {two:,.0f} s on two GPUs"
    gain = 1 - one["widened_seconds"] / one["seconds"]
    return (
        f"- several GPUs a run, {one['gpus']} GPUs{without}: the longest run ({one['longest']}, {alone:,.0f} s) {on_two}; "
        f"with the best of 1, 2, 4 and 8 GPUs for the longest runs the makespan goes from {one['seconds']:,.0f} to "
        f"{one['widened_seconds']:,.0f} s ({gain:.0%} shorter, {one['widened_runs']} runs on several)."
    )


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figure as PNG and PDF, and give the PNG's path."""
    from benchmarks.figures import save_figures

    return save_figures(folder, {"cluster": lambda: makespans(report)})


def makespans(report: dict[str, Any]) -> Figure:
    """Makespan over GPUs, both axes logarithmic, with the floor of each guess."""
    from matplotlib.figure import Figure

    from benchmarks.figures import INK, grid

    figure = Figure(figsize=(6.8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for case, colour, marker in zip(report["cases"], COLOURS, "os", strict=True):
        _curve(axes, case, colour, marker)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [row["gpus"] for row in report["cases"][0]["sizes"]]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("GPUs")
    low = 0.6 * min(row["floor"] for case in report["cases"] for row in case["sizes"])
    high = max(row["highest"] for case in report["cases"] for row in case["sizes"])
    ticks = {60: "1 min", 180: "3 min", 600: "10 min", 1800: "30 min", 3600: "1 h", 3 * 3600: "3 h", 10 * 3600: "10 h",
             24 * 3600: "1 day", 72 * 3600: "3 days"}  # fmt: skip
    shown = {at: text for at, text in ticks.items() if low <= at <= 1.4 * high}
    axes.set_yticks(list(shown), list(shown.values()))
    axes.minorticks_off()
    axes.set_ylim(low, 1.4 * high)
    axes.set_title("Table 1 of the paper, simulated: makespan by cluster size", loc="left", color=INK, fontsize=12)
    grid(axes, "both")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _curve(axes: Axes, case: dict[str, Any], colour: str, marker: str) -> None:
    """What was simulated with its range, and the two floors: work dealt out evenly, and the longest run."""
    rows = case["sizes"]
    sizes = [row["gpus"] for row in rows]
    longest = max(seconds for found in case["lengths"].values() for seconds in found.values())
    low, high = ([row[name] for row in rows] for name in ("lowest", "highest"))
    axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(sizes, [row["seconds"] for row in rows], color=colour, marker=marker, markersize=6, linewidth=0,
              label=f"{case['name']}: simulated")  # fmt: skip
    evenly = [3600 * case["gpu_hours"] / size for size in sizes]
    axes.plot(sizes, evenly, color=colour, linestyle="--", linewidth=1.2, label=f"{case['name']}: work / GPUs")
    axes.plot(sizes, [longest] * len(sizes), color=colour, linestyle=":", linewidth=1.4,
              label=f"{case['name']}: longest run")  # fmt: skip
