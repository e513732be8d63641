"""`procap bench SUITE`: the experiments of the paper, by name, and those of a user's own file.

The suites are looked up when they are asked for, so that no other command waits for their modules.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from benchmarks.cli.flags import EngineFlags, LaunchFlags, ModeFlags, OutputFlags, RuntimeFlags, SuiteFlags, flat
from benchmarks.console.help import PLAIN, examples


class SuiteGroup(TyperGroup):
    """The group of `procap bench`, which knows suites by name or file beside the commands that are written out."""

    def list_commands(self, ctx: Any) -> list[str]:
        from benchmarks.suites import ALL, suite_paths

        return [ALL, *dict.fromkeys([*suite_paths(), *super().list_commands(ctx)])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from benchmarks.suites import ALL, suite_paths

        if (written_out := super().get_command(ctx, cmd_name)) is not None:
            return written_out
        if cmd_name == ALL or cmd_name in suite_paths() or cmd_name.endswith(".py"):
            return command(cmd_name)
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        from benchmarks.suites import ALL, suite_named

        titles = {name: "every suite of the paper, and the report" for name in (ALL,)}
        titles |= {name: suite_named(name).title for name in self.list_commands(ctx) if name != ALL}
        with formatter.section("Commands"):
            formatter.write_dl(list(titles.items()))


def command(name: str) -> Any:
    """The command of one suite, or of all; its help is what the suite's file says."""
    from benchmarks.suites import ALL, suite_named, suite_text

    if name == ALL:
        text, lines = (
            EVERYTHING,
            ["--profile mini --quick", "--data DATA --results RESULTS --launcher ray", "--dry-run"],
        )
    else:
        suite_named(name)
        text, lines = (
            suite_text(name),
            ["--quick", "--profile mini --dry-run", "--data DATA --results RESULTS --launcher ray"],
        )

    @flat
    def run(
        suited: SuiteFlags,
        many: LaunchFlags,
        place: RuntimeFlags,
        parallel: EngineFlags,
        doing: ModeFlags,
        output: OutputFlags,
        limit: Annotated[
            int | None, typer.Option(metavar="N", help="evaluate on the first N images only; results are marked")
        ] = None,
        price: Annotated[
            float | None,
            typer.Option(metavar="AMOUNT", min=0, help="of an hour of a GPU or machine: --dry-run says what it costs"),
        ] = None,
    ) -> int:
        from benchmarks.cli.bench import bench

        return bench(name, suited, many, place, parallel, doing, output, limit, price)

    alone = typer.Typer(**PLAIN)
    help_text = f"{text.strip()}\n\n{AGAIN}"
    alone.command(name=name, help=help_text, **examples(*[f"procap bench {name} {line}" for line in lines]))(run)
    return typer.main.get_command(alone)


EVERYTHING = """Every suite of the paper, in one go, and the report.

A run that several suites share is done once. With --datasets those suites keep their own that have a list of their own.
"""
AGAIN = "What has finished is never repeated, what was interrupted goes on: stop it anywhere and type it again."

app = typer.Typer(help="Run the experiments of the paper, by name.", cls=SuiteGroup, **PLAIN)


@app.callback(**examples("procap bench all --profile mini --quick", "procap bench base-to-novel --help"))
def bench() -> None:
    # With a single command typer would otherwise leave out its name.
    pass


@app.command(
    **examples(
        "procap bench runtime",
        "procap bench runtime --backbone ViT-B/16 --random --steps 3",
        "procap bench runtime --datasets oxford-flowers,ucf101 --backbone ViT-B/16 --precision fp32,bf16",
        "procap bench runtime --check",
    )
)
@flat
def runtime(
    place: RuntimeFlags,
    output: OutputFlags,
    methods: Annotated[str, typer.Option(metavar="A,B", help="methods to compare")] = "zeroshot,maple,procap",
    datasets: Annotated[
        str,
        typer.Option(metavar="A,B", help="data sets; photographs-102: made-up images, as many as 16-shot Flowers102"),
    ] = "",
    modes: Annotated[str, typer.Option(metavar="A,B", help="reference works as public code does")] = "reference,fast",
    precision: Annotated[str, typer.Option(metavar="fp32,bf16", help="one or both [default: fp32]")] = "",
    backbone: Annotated[str, typer.Option(metavar="NAME", help="CLIP [default: mini]")] = "",
    pretrained: Annotated[str, typer.Option(metavar="TAG|FILE", help="weights of the backbone")] = "",
    random: Annotated[bool, typer.Option("--random", help="random weights; no accuracy is shown then")] = False,
    epochs: Annotated[int, typer.Option(metavar="N", help="of every training")] = 10,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="measure N training steps and extrapolate, which the table says")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="rounds of evaluation and of every size")] = 5,
    batch: Annotated[int, typer.Option(metavar="N", help="images per training step")] = 32,
    test_batch: Annotated[int, typer.Option(metavar="N", help="images per evaluated batch")] = 100,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="measure what fits, extrapolate and limit the rest, and say so; 0: no limit "
            "[default: 150 for mini and 900 else on a CPU, no limit on a GPU]",
        ),
    ] = None,
    scaling: Annotated[
        str, typer.Option(metavar="CLASSESxBATCHES|off", help="sizes, as in 10,50,200x4,32, the default with mini")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="say what is to be reached, met or not; chooses full size on a GPU")
    ] = False,
) -> int:
    """Time training and inference of every method, as public code does it and as this program does.

    Seconds of ten epochs, images per second, memory, operations against the peak of this device, and accuracy, beside
    the paper's table. Nothing else should run on the machine.
    """
    from benchmarks.cli.bench_runtime import bench_runtime
    from benchmarks.runtime.settings import Flags

    flags = Flags(
        methods=methods,
        datasets=datasets,
        modes=modes,
        precision=precision,
        backbone=backbone,
        pretrained=pretrained,
        random=random,
        epochs=epochs,
        steps=steps,
        repeats=repeats,
        batch=batch,
        test_batch=test_batch,
        budget=budget,
        scaling=scaling,
        check=check,
    )
    return bench_runtime(flags, place, output)
