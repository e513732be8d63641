"""What the cluster simulation tells of the paper's Table 1, as Markdown and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.console.output import plural
from benchmarks.studies.cluster_simulation.study import DATASETS, METHODS, SEEDS
from benchmarks.tables.pipes import pipes
from runner.progress import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00")
SIZES_HEADERS = ("GPUs", "makespan", "floor", "above floor", "GPU-hours", "cost", "used", "not sorted")
FAILING_HEADERS = (
    "GPUs", "hours between failures of a node", "makespan", "longest", "nodes lost", "runs struck", "GPU-minutes lost",
    "used",
)  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    cases = [part for case in report["cases"] for part in _case(case)]
    return "\n\n".join([*_head(report), *cases, *_assumptions(report)]) + "\n"


def _head(report: dict[str, Any]) -> list[str]:
    first = report["cases"][0]
    few, many = (first["sizes"][place]["gpus"] for place in (0, -1))
    sizes = plural(many, "GPU") if few == many else f"{few} to {many} GPUs"
    return [
        f"# The paper's Table 1 on {sizes}: a simulation, not a measurement",
        f"{first['runs']} runs: {len(DATASETS)} data sets x {', '.join(METHODS)} x seeds {', '.join(map(str, SEEDS))}, "
        "ViT-B/16, bf16, trained on the base classes of 16 shots by the methods' own recipes, tested on base and novel "
        "classes. NO GPU WAS MEASURED BY THIS PROGRAM YET; two guesses at how fast one is:",
        "\n".join(f"- **{case['name']}**: {case['what']}." for case in report["cases"]),
        f"    {report['command']}",
        f"Makespan is mean ± standard deviation of {report['seeds']} simulations; floor: all work and starts evenly "
        "over the GPUs, or the longest run; used: share of the rented GPU-hours in which work was done that counted.",
    ]


def _case(case: dict[str, Any]) -> list[str]:
    return [
        f"## {case['name']}: {case['gpu_hours']:.1f} GPU-hours of work and starts",
        _sizes_table(case),
        "Seconds of a run, its start included:",
        _lengths_table(case),
        "When nodes fail more often:",
        _failing_table(case),
        "\n".join(map(_wider, case["widened"])),
    ]


def _assumptions(report: dict[str, Any]) -> list[str]:
    given = report["conditions"]
    mtbf = given["mtbf_hours"]
    lines = [
        "- measured, on processors: what decoding costs (loader.json; 12 threads decode beside a GPU). Counted: "
        "the operations of every step and evaluation (`benchmarks.cost.flops`). All else of a GPU is assumed.",
        f"- assumed: {given['start']:g} s from the start of an attempt to its first step (weights, compiling "
        "from a kept cache, recording; processes stay for the runs that follow: their own start is left out), "
        f"{given['hand_out']:g} s of the driver for each attempt, one after another.",
        "- runs begin in the order of the list, long ones first; `not sorted` is the same without failures in the "
        "order data set, method, seed. Nothing is known of images that wait for a network or a disk.",
        f"- a node of {given['per_node']} GPUs fails "
        + ("never" if mtbf is None else f"every {mtbf:,.0f} hours on average, independently of time and of others")
        + f"; it is noticed after {given['notice']:g} s and replaced after {given['replace']:g} s. A training is "
        f"saved every {given['checkpoint']:g} s, an evaluation not at all. (Llama 3's training lost 419 times a "
        "part of 16,384 GPUs in 54 days: 6,300 hours for each 8.)",
        f"- all GPUs are paid until the last run has ended, {report['price']:g} an hour: a number to multiply, no "
        "offer.",
    ]
    return ["## Assumptions", "\n".join(lines), "![makespan over GPUs](cluster.png)"]


def _sizes_table(case: dict[str, Any]) -> str:
    body = []
    for row, listed in zip(case["sizes"], case["as_listed"], strict=True):
        cells = [
            str(row["gpus"]),
            duration(row["seconds"]) + (f" ± {duration(row['deviation'])}" if row["deviation"] >= 0.5 else ""),
            duration(row["floor"]),
            f"{row['seconds'] / row['floor'] - 1:.1%}",
            f"{row['gpu_hours']:.1f}",
            f"{row['cost']:,.0f}",
            f"{row['utilisation']:.0%}",
            duration(listed),
        ]
        body.append(cells)
    return pipes(SIZES_HEADERS, body, left=0)


def _lengths_table(case: dict[str, Any]) -> str:
    body = [[method, *(f"{found[name]:,.0f}" for name in DATASETS)] for method, found in case["lengths"].items()]
    return pipes(("", *DATASETS), body, left=1)


def _failing_table(case: dict[str, Any]) -> str:
    body = [
        [
            str(row["gpus"]),
            f"{row['mtbf_hours']:,.0f}",
            f"{duration(row['seconds'])} ± {duration(row['deviation'])}",
            duration(row["highest"]),
            f"{row['failures']:.2f}",
            f"{row['struck']:.2f}",
            f"{row['lost_gpu_seconds'] / 60:.1f}",
            f"{row['utilisation']:.0%}",
        ]
        for row in case["failing"]
    ]
    return pipes(FAILING_HEADERS, body, left=0)


def _wider(one: dict[str, Any]) -> str:
    alone, two = one["longest_seconds"]
    without = f" without {', '.join(one['left_out'])}" if one["left_out"] else ""
    on_two = "cannot be dealt out, its batch is one image" if two is None else f"takes {two:,.0f} s on two GPUs"
    gain = 1 - one["widened_seconds"] / one["seconds"]
    return (
        f"- several GPUs a run, {one['gpus']} GPUs{without}: the longest run ({one['longest']}, {alone:,.0f} s) "
        f"{on_two}; with the best of 1, 2, 4 and 8 GPUs for the longest runs the makespan goes from "
        f"{one['seconds']:,.0f} to {one['widened_seconds']:,.0f} s ({gain:.0%} shorter, "
        f"{one['widened_runs']} runs on several)."
    )


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figure as PNG and PDF, and give the PNG's path."""
    from benchmarks.plots import save_figures

    return save_figures(folder, {"cluster": lambda: makespans(report)})


def makespans(report: dict[str, Any]) -> Figure:
    """Makespan over GPUs, both axes logarithmic, with the floor of each guess."""
    from matplotlib.figure import Figure

    from benchmarks.plots import INK, grid

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
