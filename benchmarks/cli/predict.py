"""`procap predict`: classify new images with a trained run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli import flags
from benchmarks.cli.selection import find_run, find_selected_run, runtime_config
from benchmarks.console.output import csv_text, note, one_line, plural, show, show_json
from benchmarks.console.parse import parse_class_names
from procap.errors import UsageError
from runner.session import Session
from shards.files import explain_writing, require_regular
from shards.raw.folders import is_image_name, walk_files

if TYPE_CHECKING:
    from torch import Tensor

DIGITS = 6


@flags.command(
    "procap predict results/base/petals/procap/mini/16shot/seed1-9c6ad2e1 photos --out predictions.csv",
    "procap predict RUN one.jpg two.png --top 3",
    "procap predict --methods procap --datasets petals photos",
    "procap predict 9c6ad2 photos --names 'red rose,white lily'",
)
def predict(
    selection: flags.FilterFlags,
    run: Annotated[
        Path,
        flags.run_argument("folder of a run, or start of its hash; with --best or filters the first PATH", "RUN|PATH"),
    ],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="images, folders of images, tar files"),
    ] = None,
    out: Annotated[Path | None, flags.flag("FILE", "CSV file [default: stdout]")] = None,
    html: Annotated[Path | None, flags.flag("FILE", "page of the first 500 pictures with their classes")] = None,
    top: Annotated[int, flags.flag("K", "at most K classes of an image, the most probable first", min=1)] = 1,
    names: Annotated[str, flags.flag("A,B|FILE", "classes to choose from [default: those that the run learned]")] = "",
    best: Annotated[
        bool, flags.switch("--best", "of the runs that flags select, that with the highest validation accuracy")
    ] = False,
    results: flags.Results = "results",
    data: flags.Data = "",
    device: flags.Device = "auto",
    workers: Annotated[int | None, flags.flag("N", "threads that decode images", min=0)] = None,
) -> int:
    """Classify new images with a trained run.

    Writes a row for each image: its path, the most probable class, the name of this class in prompts (`label`), and the
    probability. Images that cannot be read are named at the end. Rows are written as they come: a command that is
    stopped keeps them, and starts over when it is repeated.
    """
    for file, what in ((out, "--out {}: name a CSV file"), (html, "--html {}: name an HTML file")):
        if file and (file.is_dir() or not file.parent.is_dir() or is_image_name(file.name)):
            raise UsageError(f"{what.format(file)} in a folder that exists")
    if html and (_is_stdout(html) or (out and out.resolve() == html.resolve())):
        raise UsageError(f"--html {html}: name another file than that of the rows and of stdout")
    for file in filter(None, (html, out)):
        with explain_writing(file):
            # No file can be made next to a device, and a pipe must not be opened twice.
            if file is html or not file.exists():
                TemporaryFile(dir=require_regular(file).parent).close()
            elif file.is_file():
                file.open("a").close()
    if out and _is_stdout(out):
        # A file that stdout is redirected to keeps what is in it.
        out = None
    session = Session(runtime_config(flags.StorageFlags(results=results, data=data, device=device)))
    if best or flags.command_line(selection):
        paths = [run, *(paths or ())]
        selected = find_selected_run(selection, session, best=best)
    elif paths:
        selected = find_run(run, session)
    else:
        raise UsageError("name a run and images, or select a run with --best or flags such as --methods")
    # These import torch, which a wrong flag need not wait for.
    from benchmarks.qualitative.prediction_page import write_page
    from runner.predict import ImageClassifier
    from runner.trained_runs import load_trained
    from shards.loose_images import find_images

    failed: dict[str, str] = {}

    def on_error(name: str, reason: str) -> None:
        failed[name] = one_line(reason)

    chosen = parse_class_names(names)
    images = find_images(paths, on_error)
    classifier = ImageClassifier(load_trained(selected), chosen)
    config, classes = selected.config, classifier.classnames
    if config.classes != "all" and not names:
        known = f"{plural(len(classes), 'name')} of {config.classes} classes of {config.dataset}"
        note(f"an image gets one of the {known}; --names gives others, or train with --classes all")
    predictions = classifier.predict(images, workers, on_error)
    labels = list(zip(classifier.space.classnames, classes, strict=True))
    count, answers = _write_predictions(predictions, labels, min(top, len(classes)), out)
    if html and count:
        # Errors were reported before.
        write_page(html, f"Predictions of {config.path}", find_images(paths, lambda *_: None), answers, count)
        note(f"pictures: {html}")
    files = [str(path / file) for path in paths if path.is_dir() for file, _ in walk_files(path)]
    if skipped := sum(not is_image_name(file) and file not in failed for file in files):
        note(f"{plural(skipped, 'file')} skipped, no images")
    for name, reason in failed.items():
        note(f"procap: error: {name} {reason}")
    destination = str(out) if out and count else None
    show_json({"run": config.path, "images": count, "classes": classes, "out": destination, "failed": failed})
    return 1 if failed else 0


def _is_stdout(file: Path) -> bool:
    # Either may not exist.
    with suppress(OSError):
        return os.path.samefile(file, "/dev/stdout")
    return False


def _write_predictions(
    predictions: Iterator[tuple[str, Tensor]], labels: Sequence[tuple[str, str]], top: int, out: Path | None
) -> tuple[int, dict[str, list[tuple[str, float]]]]:
    """Write a row for each image to stdout or the file `out`, which is opened when the first image is classified.

    labels: the name of each class in the data set, and in prompts. Returns the number of images, and for the first of
    them, by name, the likeliest classes with their probabilities. Raises Interrupted for a signal.
    """
    from benchmarks.qualitative.prediction_page import MAX_PICTURES
    from runner.progress_bar import ProgressDisplay
    from runner.stop_signals import StopRequest

    answers: dict[str, list[tuple[str, float]]] = {}
    count, numbers = 0, ["", *(f"_{rank}" for rank in range(2, top + 1))]
    rows = [["path", *(f"{name}{number}" for number in numbers for name in ("class", "label", "probability"))]]
    with ExitStack() as stack:
        display = stack.enter_context(ProgressDisplay("predict", 0, unit="images", quiet=out is None, timed=False))
        stop, file = stack.enter_context(StopRequest()), None
        for count, (name, probabilities) in enumerate(predictions, 1):
            if out and not file:
                # Names of files can have bytes that are no UTF-8.
                opened = out.open("w", encoding="utf-8", errors="backslashreplace", newline="", buffering=1)
                file = stack.enter_context(opened)
            best = [*zip(*(values.tolist() for values in probabilities.topk(top)), strict=True)]
            rows.append([name, *(cell for value, label in best for cell in (*labels[label], f"{value:.{DIGITS}f}"))])
            text, rows = csv_text(rows).rstrip("\n"), []
            print(text, file=file) if file else show(text)
            if count <= MAX_PICTURES:
                answers[name] = [(labels[label][1], value) for value, label in best]
            display.total = count
            display.update(count)
            stop.check(f"stopped after {plural(count, 'image')}{f' in {out}' if out else ''}; repeated, it starts over")
    if count and out:
        note(f"{plural(count, 'image')} in {out}")
    return count, answers
