"""A contestant's measurements as one row of the runtime benchmark's report: plain JSON, null where nothing is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.runtime.measure import Spread
from benchmarks.runtime.settings import TITLES, Settings

if TYPE_CHECKING:
    from benchmarks.runtime.case import Contestant, Passes
    from benchmarks.runtime.data import Contest

NO_MEANING = {
    "random": "the weights are random",
    "made-up": "the images show nothing",
    "unfinished": "not trained to the end",
}


def row(
    contestant: Contestant,
    contest: Contest,
    settings: Settings,
    passes: Passes,
    encoder: Sequence[float],
    peak: float,
    load_seconds: float,
) -> dict[str, Any]:
    """Everything that was measured of `contestant`.

    encoder: seconds of one test batch already on the device. peak: operations per second of this device's products.
    """
    batch = min(settings.test_batch, len(contest.test.images))
    step, encoded = contestant.step_seconds(), Spread.of(encoder)
    assert encoded is not None
    end_to_end = Spread.of(passes.seconds)
    train_start, eval_start = contestant.train_start, contestant.eval_start
    assert end_to_end is not None and eval_start is not None
    step_flops = train_start.flops if train_start else None
    batch_flops = eval_start.flops
    finished = contestant.steps_done == contestant.steps
    why = _no_meaning(settings, contest, finished)
    return {
        "dataset": contest.name,
        "method": contestant.config.method,
        "title": TITLES.get(contestant.config.method, contestant.config.method),
        "mode": contestant.mode,
        "precision": contestant.config.precision,
        "accelerations": asdict(contestant.ways),
        "recorded": {
            "train": contestant.training.recorded if contestant.trains else None,
            "eval": contestant.evaluation.recorded,
        },
        "options": contestant.config.options,
        "classes": len(contest.fewshot.classnames),
        "train_images": len(contest.fewshot.train),
        "batch": settings.batch,
        "test_batch": batch,
        "epochs": contestant.config.recipe.epochs,
        "steps": contestant.steps,
        "steps_measured": contestant.steps_done,
        "extrapolated": not finished,
        "train_seconds": contestant.train_seconds(),
        "step_seconds": _spread(step),
        "encoder_fps": asdict(encoded.rate(batch)),
        "end_to_end_fps": asdict(end_to_end.rate(passes.images)),
        "test_images": passes.images,
        "test_images_all": len(contest.test.images),
        "correct": passes.correct,
        "accuracy": None if why else 100 * passes.correct / passes.images,
        "accuracy_note": why,
        "first_loss": train_start.loss if train_start else None,
        "last_loss": contestant.last_loss,
        "start_seconds": {"train": train_start.seconds if train_start else None, "eval": eval_start.seconds},
        "peak_bytes": {"train": train_start.peak if train_start else None, "eval": eval_start.peak},
        "flops": {"step": step_flops, "image": batch_flops / batch},
        "flops_per_second": {
            "train": None if step is None or step_flops is None else step_flops / step.median,
            "eval": batch_flops / encoded.median,
        },
        "share_of_peak": {
            "train": None if step is None or step_flops is None else step_flops / step.median / peak,
            "eval": batch_flops / encoded.median / peak,
        },
        "joules_per_image": _joules(contestant, settings.batch),
        "phases": _phases(contestant, contest, passes, load_seconds),
    }


def _no_meaning(settings: Settings, contest: Contest, finished: bool) -> str | None:
    """Why an accuracy would mislead, None where it does not."""
    if settings.pretrained == "random":
        return NO_MEANING["random"]
    if contest.made_up:
        return NO_MEANING["made-up"]
    return None if finished else NO_MEANING["unfinished"]


def _phases(contestant: Contestant, contest: Contest, passes: Passes, load_seconds: float) -> dict[str, float | None]:
    """Seconds of the measured steps and of one evaluation.

    load: backbone and data set. start: warm-up, compiling and recording of both kinds of work. decode and augment: work
    of one core for the images of the measured steps, from a look at a few of them; "data" is how long training really
    waited for images, in which both are contained.
    """
    steps, batch = contestant.steps_done, contestant.config.recipe.batch_size
    seen = steps * min(batch, len(contest.fewshot.train))
    once = seen if contestant.mode == "reference" else min(seen, len(contest.fewshot.train))
    meter = contestant.meter.phases
    evaluation = Spread.of(passes.seconds)
    starts = (contestant.train_start, contestant.eval_start)
    return {
        "load": load_seconds + contest.load_seconds,
        "start": sum(start.seconds for start in starts if start is not None),
        "decode": once * contest.decode,
        "augment": seen * contest.augment,
        **{name: meter[name] for name in ("data", "forward", "backward", "optimizer")},
        "evaluation": None if evaluation is None else evaluation.median,
        "evaluation_classes": passes.class_seconds,
        "evaluation_decode": passes.images * contest.decode,
        "evaluation_transform": passes.images * contest.transform,
    }


def _joules(contestant: Contestant, batch: int) -> float | None:
    measured = [(r.joules, r.steps) for r in contestant.rounds if r.joules is not None]
    steps = sum(count for _, count in measured)
    return sum(joules for joules, _ in measured) / steps / batch if steps else None


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else asdict(spread)
