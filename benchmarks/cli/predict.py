"""`procap predict`: classify new images with a trained run."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli import flags
from benchmarks.cli.eval import find_run
from benchmarks.cli.selection import runtime_config
from benchmarks.console.help import PLAIN, examples
from benchmarks.console.output import csv_text, note, plural, show, show_json
from benchmarks.console.parse import split_names
from procap.errors import UsageError
from runner.environment import library_defaults

if TYPE_CHECKING:
    from torch import Tensor

    from runner.predict import ImageClassifier

DIGITS = 6

app = typer.Typer(**PLAIN)


@app.command(
    **examples(
        "procap predict results/base/petals/procap/mini/16shot/seed1-9c6ad2e1 photos --out predictions.csv",
        "procap predict RUN one.jpg two.png --top 3",
        "procap predict RUN photos --names 'red rose,white lily'",
    )
)
@flags.flat
def predict(
    output: flags.OutputFlags,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, see `procap ls runs`")],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="images, folders of images, tar files")],
    out: Annotated[Path | None, flags.flag("FILE", "CSV file [default: stdout]")] = None,
    top: Annotated[int, flags.flag("K", "the most probable classes of an image, best first", min=1)] = 1,
    names: Annotated[str, flags.flag("A,B", "classes to choose from [default: those that the run learned]")] = "",
    results: flags.Results = "results",
    device: flags.Device = "auto",
    workers: Annotated[int | None, flags.flag("N", "threads that decode images", min=0)] = None,
) -> int:
    """Classify new images with a trained run.

    Writes a row for each image: its path, the most probable class, and the probability. Images are transformed and
    classified as in `procap eval`, at its speed. An image that cannot be read ends the command with its name.
    """
    library_defaults()
    if out and not out.expanduser().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it first")
    config, runtime = find_run(run, runtime_config(flags.RuntimeFlags(results=results, device=device)))
    # These import torch, which a wrong flag need not wait for.
    from runner.evaluate import load_trained
    from runner.predict import ImageClassifier
    from runner.progress import ProgressDisplay
    from runner.results import write_bytes
    from shards.image_files import find_images

    classifier = ImageClassifier(load_trained(config, runtime), split_names(names))
    if config.classes != "all" and not names:
        known = f"{plural(len(classifier.classnames), 'name')} of {config.classes} classes of {config.dataset}"
        note(f"an image gets one of the {known}; --names gives others, or train with --classes all")
    top = min(top, len(classifier.classnames))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    numbers = ["", *(f"_{place}" for place in range(2, top + 1))]
    table.writerow(["path", *(f"{column}{number}" for number in numbers for column in ("label", "probability"))])
    count = 0
    with ProgressDisplay("predict", 0, unit="images", quiet=out is None, timed=False) as display:
        for name, probabilities in classifier.predict(find_images(paths), workers):
            table.writerow(map(csv_text, (name, *_best(classifier, probabilities, top))))
            count += 1
            display.total = count
            display.update(count)
    if out is None:
        show(text.getvalue().rstrip("\n"))
    else:
        write_bytes(out.expanduser(), text.getvalue().encode())
        note(f"{plural(count, 'image')} in {out}")
    if output.json:
        show_json({"run": config.path, "images": count, "classes": classifier.classnames, "out": out and str(out)})
    return 0


def _best(classifier: ImageClassifier, probabilities: Tensor, top: int) -> list[str]:
    """Return the names and probabilities of the `top` most probable classes."""
    values, classes = probabilities.topk(top)
    pairs = zip(classes.tolist(), values.tolist(), strict=True)
    return [cell for number, value in pairs for cell in (classifier.classnames[number], f"{value:.{DIGITS}f}")]
