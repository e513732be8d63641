"""Write the tables and plots of the scaling benchmark: measurements, and estimates of the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots.style import FAINT, INK, grid, save_plots
from benchmarks.results.runtime import METHOD_TITLES
from benchmarks.tables.render import markdown_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS_HEADERS = (
    "method", "on", "classes", "ms", "lowest-highest", "CPU ms", "speed-up", "efficiency", "model", "in messages",
    "MB sent", "messages", "MB of a step", "MB of the process",
)  # fmt: skip
PARTS_HEADERS = ("method", "classes", "images ms", "classes ms", "every ms", "gradients MB")
MOST_HEADERS = (
    "GPUs", "batch", "classes", "one GPU", "sharded", "in messages", "idle", "all classes on each", "recorded",
    "pays up to",
)  # fmt: skip
LINE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def table(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    return "\n\n".join([*_measured(report), *_expected(report)]) + "\n"


def _measured(report: dict[str, Any]) -> list[str]:
    machine, rows, links = report["environment"], report["rows"], report["links"]
    before, after = report["load_average"]
    counts = sorted({str(len(row["seconds"])) for row in rows}, key=int)
    rounds = " to ".join(dict.fromkeys((counts[0], counts[-1])))
    notes = [
        "- several processes: each has its share of the images and, unless noted, of the classes.",
        "- speed-up: milliseconds of one process over these, median over the rounds; efficiency: by the number of "
        "processes. CPU ms: of the processor, by the process that used most; they leave out waiting, also for a core.",
        "- model: the speed-up that the parts below and this machine's messages let expect.",
        "- in messages: of a step, sending, receiving and waiting for the others, mean of the processes.",
        "- MB sent: by one process in a step, counted from its tensors; MB of a step: tensors alive at once; MB of the "
        "process: its peak in a step, libraries and weights included; of the process that has most.",
    ]
    return [
        "# A training step on several processes",
        f"Steps on {report['backbone']} with a global batch of {rows[0]['job']['batch']} synthetic images; processes "
        f"of one thread each, gloo, {machine['cpu']['name']}, {report['cores']} cores, torch "
        f"{machine['packages']['torch']}; medians of {rounds} interleaved rounds.\n"
        f"Load of the machine before and after: {before:.1f} and {after:.1f}.{' ' if report['note'] else ''}"
        f"{report['note']}",
        f"    {report['command']}",
        _steps_table(rows),
        "\n".join(notes),
        "Parts of a step on one process, from steps over half the images and half the classes; `every` is what several "
        f"processes do alike. A message starts in {1e6 * links['start']:.0f} us and goes at "
        f"{links['rate'] / 1e9:.1f} GB/s.",
        _parts_table(report["parts"]),
    ]


def _steps_table(rows: list[dict[str, Any]]) -> str:
    alone = {_job(row): row["expected"] for row in rows if row["variant"]["processes"] == 1}
    return markdown_grid(STEPS_HEADERS, [_step(row, alone[_job(row)]) for row in rows], left=2)


def _step(row: dict[str, Any], alone: float) -> list[str]:
    seen = row["communication"]
    several = row["variant"]["processes"] > 1
    return [
        _title(row["job"]["method"]),
        row["variant"]["name"],
        f"{row['job']['classes']:,}",
        f"{1e3 * row['median']:.0f}",
        f"{1e3 * min(row['seconds']):.0f}-{1e3 * max(row['seconds']):.0f}",
        f"{1e3 * row['cpu_median']:.0f}",
        f"{row['speedup']:.2f}" if several else "",
        f"{row['efficiency']:.0%}" if several else "",
        f"{alone / row['expected']:.2f}" if several else "",
        ("not seen" if seen is None else f"{seen:.0%}") if several else "",
        f"{row['sent_bytes'] / 1e6:.2f}" if several else "",
        str(row["messages"]) if several else "",
        f"{row['tensor_bytes'] / 1e6:.0f}",
        f"{row['process_bytes'] / 1e6:.0f}",
    ]


def _parts_table(parts: list[dict[str, Any]]) -> str:
    body = [
        [
            _title(one["job"]["method"]),
            f"{one['classes']:,}",
            f"{1e3 * one['image']:.0f}",
            f"{1e3 * one['text']:.0f}",
            f"{1e3 * one['every']:.0f}",
            f"{one['gradients'] / 1e6:.2f}",
        ]
        for one in parts
    ]
    return markdown_grid(PARTS_HEADERS, body, left=1)


def _expected(report: dict[str, Any]) -> list[str]:
    first, estimates = report["gpus"][0], report["estimates"]
    method = estimates[0]["method"]
    assumptions = [
        *(f"- {_described(gpu)}" for gpu in report["gpus"]),
        f"- a step is {_listed(report)} operations, counted on mini, where nothing is compiled or fused. Replayed an "
        f"operation takes {1e6 * first['replay']:.0f} us at least, launched by Python {1e6 * first['launch']:.0f} us. "
        "Steps of one GPU are recorded and replayed, those of several are launched one by one.",
        "- gradients are float32, all-reduced in a ring after the backward pass: the learnables lie before both "
        "towers, so nothing of it hides. AdamW and the refinement's weights go through memory on every GPU.",
        "- images arrive in time; all GPUs are equally fast; the class-independent prefix is sharded like the rest.",
    ]
    return [
        "## Up to 64 GPUs: a model, not a measurement",
        "No number below was measured. `benchmarks/studies/scaling/model.py` computes them from the operations counted "
        "for ViT-B/16 (`benchmarks.runtime.flops`), with these assumptions:",
        "\n".join(assumptions),
        f"Milliseconds of a step and speed-up over one GPU, {first['name']}, classes sharded:",
        _ranks_table(estimates, first["name"]),
        "`-`: the global batch does not divide. pays up to: the most GPUs of which half is still turned into speed.",
        f"{_title(method)} at the most GPUs that the batch allows, ms of a step; recorded: if steps of "
        "several GPUs were replayed as well:",
        markdown_grid(MOST_HEADERS, [_most(one) for one in estimates if one["method"] == method], left=1),
        _why(report),
    ]


def _ranks_table(estimates: list[dict[str, Any]], gpu: str) -> str:
    counts = sorted({cost["ranks"] for one in estimates for cost in one["ranks"]})
    body = []
    for one in estimates:
        if one["gpu"] == gpu:
            cells = {cost["ranks"]: f"{1e3 * cost['seconds']:.1f} ({cost['speedup']:.1f})" for cost in one["ranks"]}
            shown = [cells.get(ranks, "-") for ranks in counts]
            name = (_title(one["method"]), str(one["batch"]), f"{one['parts']['classes']:,}")
            body.append([*name, *shown, str(one["pays_up_to"])])
    return markdown_grid(("method", "batch", "classes", *map(str, counts), "pays up to"), body, left=1)


def _most(one: dict[str, Any]) -> list[str]:
    last = one["ranks"][-1]
    return [
        f"{last['ranks']} {one['gpu']}",
        str(one["batch"]),
        f"{one['parts']['classes']:,}",
        f"{1e3 * one['ranks'][0]['seconds']:.1f}",
        f"{1e3 * last['seconds']:.1f}",
        f"{(last['gather'] + last['all_reduce']) / last['seconds']:.0%}",
        f"{last['idle'] / last['seconds']:.0%}",
        f"{1e3 * last['whole_seconds']:.1f}",
        f"{1e3 * last['recorded_seconds']:.1f}",
        str(one["pays_up_to"]),
    ]


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write the plot as PNG and PDF; returns the PNG's path."""
    return save_plots(folder, {"scaling": lambda: plot_speedups(report)})


def plot_speedups(report: dict[str, Any]) -> Figure:
    """Plot speed-up against processes: measured for every method, and the model of many GPUs by batch."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(row["job"]["method"] for row in report["rows"]))
    batches = sorted({one["batch"] for one in report["estimates"]})
    gpu = report["gpus"][0]["name"]
    classes = {row["job"]["classes"] for row in report["rows"]} | {e["parts"]["classes"] for e in report["estimates"]}
    # One colour per number of classes, in all panels.
    colours = dict(zip(sorted(classes), LINE_COLOURS * len(classes), strict=False))
    figure = Figure(figsize=(3.5 * (len(methods) + len(batches)), 4.0), layout="constrained")
    panels: Any = figure.subplots(1, len(methods) + len(batches), squeeze=False)[0]
    for panel, method in zip(panels, methods, strict=False):
        for row in report["rows"]:
            variant, count = row["variant"], row["job"]["classes"]
            if row["job"]["method"] == method and variant["engine"] == "ddp":
                face = colours[count] if variant["sharded"] else "white"
                panel.plot(variant["processes"], row["speedup"], "o", color=colours[count], markerfacecolor=face)
        _frame(panel, [1, 2, 4], f"{_title(method)}, {report['backbone']}, measured", "processes of one thread")
    for panel, batch in zip(panels[len(methods) :], batches, strict=True):
        for one in report["estimates"]:
            if (one["method"], one["batch"], one["gpu"]) == (methods[0], batch, gpu):
                ranks = [cost["ranks"] for cost in one["ranks"]]
                colour, alone = colours[one["parts"]["classes"]], one["ranks"][0]["seconds"]
                for key, dashes in (("seconds", "-"), ("whole_seconds", ":"), ("recorded_seconds", "-.")):
                    panel.plot(ranks, [alone / cost[key] for cost in one["ranks"]], dashes, color=colour)
        _frame(panel, ranks, f"{_title(methods[0])}, batch {batch}, model of {gpu}", "GPUs")
    panels[0].set_ylabel("speed-up over one")
    for style, label in (("o", "measured"), ("-", "model"), (":", "all classes on each"), ("-.", "steps replayed")):
        panels[0].plot([], [], style, color=INK, label=label)
    for count, colour in colours.items():
        panels[0].plot([], [], "s", color=colour, label=f"{count:,} classes")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _frame(panel: Axes, ranks: list[int], title: str, unit: str) -> None:
    panel.plot(ranks, ranks, "--", color=FAINT, linewidth=1, zorder=1)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks(ranks, [str(count) for count in ranks])
    panel.set_yticks(ranks, [str(count) for count in ranks])
    panel.set_ylim(0.4, 1.15 * max(ranks))
    panel.minorticks_off()
    panel.set_xlabel(unit)
    panel.set_title(title, loc="left", fontsize=9, color=INK)
    grid(panel, "both")


def _described(gpu: dict[str, Any]) -> str:
    links = gpu["links"]
    return (
        f"{gpu['name']}: {gpu['flops'] / 1e12:.0f} TFLOP/s of dense bfloat16 products, {gpu['reached']:.0%} of them "
        f"reached; {gpu['memory'] / 1e12:.1f} TB/s of memory, {gpu['memory_reached']:.0%} reached; "
        f"{links['per_host']} a host at {links['rate'] / 1e9:.3g} GB/s each, "
        f"{links['host_rate'] / 1e9:.3g} GB/s between hosts (both 70% of the data tables); a message starts in "
        f"{1e6 * links['start']:.0f} us and takes {1e6 * links['latency']:.0f} us for a doubling of "
        f"GPUs, {1e6 * links['host_latency']:.0f} us for one of hosts"
    )


def _why(report: dict[str, Any]) -> str:
    """Describe from which number on more GPUs do not pay."""
    one = next(one for one in report["estimates"] if one["batch"] == max(e["batch"] for e in report["estimates"]))
    parts = one["parts"]
    work, floor = parts["image"] + parts["text"] + parts["every"], parts["launched"]
    return (
        f"Why it stops: a step of {_title(one['method'])} on {one['batch']} images and {parts['classes']} classes is "
        f"{1e3 * work:.0f} ms of work on one {one['gpu']}, and launching its operations takes {1e3 * floor:.1f} ms on "
        f"however many; about {work / floor:.0f} GPUs are busy, more wait for Python. A small batch is launched more "
        "slowly than one GPU replays it: several GPUs then train several runs better than one. Next come gradients, "
        f"{parts['gradients'] / 1e6:.0f} MB at every step however small the batch, which fast links hide and slow ones "
        "do not. Dealing out classes matters where text is a large part of the work: many classes and a small batch."
    )


def _listed(report: dict[str, Any]) -> str:
    counts = {one["method"]: one["launches"] for one in report["estimates"]}
    return " and ".join(f"{count:,} ({_title(name)})" for name, count in counts.items())


def _title(method: str) -> str:
    return METHOD_TITLES.get(method, method)


def _job(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row["job"].values())
