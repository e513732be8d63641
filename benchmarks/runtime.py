"""`procap bench runtime`: the paper's runtime table, each method in reference and in fast mode side by side in one run.

    procap bench runtime                                      mini on a CPU, under three minutes
    procap bench runtime --backbone ViT-B/16 --random         full size, random weights
    procap bench runtime --check                              what is to be reached, met or not

Contestants of one data set see the same images in the same order, take turns round by round, and start every timed
stretch on an idle device. Shapes: B images, C classes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.flags import Output, Place
from benchmarks.output import note, show, show_json
from benchmarks.selection import method_names, names, numbers
from procap.errors import UsageError
from runner.environment import environment, library_defaults, resolve_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from benchmarks.runtime_contest import Contestant
    from benchmarks.runtime_scaling import Measured
    from procap.clip import CLIP
    from runner.config import RunConfig

SHOTS, SEED, TRAIN_BATCH, TEST_BATCH = 16, 1, 32, 100
METHODS, MODES = "zeroshot,maple,procap", "reference,fast"
# The paper's "MaPLe-style" has as many tokens as ProCAP, and its recipe.
OPTIONS: dict[str, dict[str, Any]] = {"maple": {"n_ctx": 4}}
TITLES = {"zeroshot": "zero-shot CLIP", "maple": "MaPLe-style", "procap": "ProCAP", "coop": "CoOp", "cocoop": "CoCoOp"}
# Where time is limited: the share of the table, the rest is for sizes; and of each data set's part that of training.
TABLE_SHARE, TRAIN_SHARE = 0.8, 0.75
FEW_ROUNDS = 3
CPU_SCALING = ((10, 50, 200), (4, 32))


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured.

    steps: training steps to measure, the rest is extrapolated and said to be; None trains to the end.
    budget: seconds of measuring after which training is extrapolated and evaluation limited, both said; None: no limit.
    """

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    modes: tuple[str, ...]
    precisions: tuple[str, ...]
    backbone: str
    pretrained: str | None
    epochs: int
    steps: int | None
    repeats: int
    batch: int
    test_batch: int
    workers: int
    budget: float | None
    scaling: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def slug(self) -> str:
        """A folder's name: what the figures are of."""
        weights = "" if self.pretrained is None else f"-{Path(self.pretrained).stem}"
        return f"{self.backbone.replace('/', '-')}{weights}-{'+'.join(self.precisions)}".lower()


@dataclass(frozen=True)
class Flags:
    """The command's own flags, as they were given."""

    methods: str = METHODS
    datasets: str = ""
    modes: str = MODES
    precision: str = ""
    backbone: str = ""
    pretrained: str = ""
    random: bool = False
    epochs: int = 10
    steps: int | None = None
    repeats: int = 5
    batch: int = TRAIN_BATCH
    test_batch: int = TEST_BATCH
    budget: float | None = None
    scaling: str = ""
    check: bool = False


def bench_runtime(flags: Flags, place: Place, output: Output) -> int:
    """See `procap bench runtime --help`."""
    from benchmarks.runtime_measure import quiet_profiler

    library_defaults()
    quiet_profiler()
    device = resolve_device(place.device)
    settings = settings_of(flags, place, device)
    report = measure(settings, place, device)
    if flags.check:
        from benchmarks.runtime_targets import more_points

        report = more_points(report, settings, device, note)
    return publish(report, settings, flags, place, output)


def publish(report: dict[str, Any], settings: Settings, flags: Flags, place: Place, output: Output) -> int:
    """Write, draw, print and track what was measured."""
    from benchmarks.runtime_figures import draw_figures
    from benchmarks.runtime_report import write_report
    from benchmarks.runtime_targets import targets, targets_table
    from benchmarks.runtime_track import track

    report["targets"] = [asdict(target) for target in targets(report)]
    folder = place.results.expanduser() / "runtime" / f"{settings.slug}-{report['device']['slug']}"
    report["folder"] = str(folder)
    text = write_report(report, folder)
    figures = draw_figures(report, folder)
    show(text)
    if flags.check:
        show("\n" + targets_table(report["targets"]))
    note(f"written to {folder}: {', '.join(path.name for path in sorted(folder.glob('runtime.*')))}")
    for figure in figures:
        note(f"figure: {figure}")
    track(report, folder, place.results.expanduser(), place.tracking)
    if output.json:
        show_json(report)
    return 0


def settings_of(flags: Flags, place: Place, device: torch.device) -> Settings:
    """What the flags and the device stand for. Raises UsageError for what cannot be."""
    from procap.loading import canonical

    gpu = device.type == "cuda"
    full = flags.check and gpu and not flags.backbone
    backbone, pretrained = canonical(
        flags.backbone or ("ViT-B-16" if full else "mini"),
        "random" if flags.random or full else flags.pretrained or None,
    )
    if flags.random and flags.pretrained:
        raise UsageError("--random and --pretrained both name weights: give one of them")
    for name, value in (("--epochs", flags.epochs), ("--repeats", flags.repeats), ("--batch", flags.batch),
                        ("--test-batch", flags.test_batch), ("--steps", flags.steps)):  # fmt: skip
        if value is not None and value < 1:
            raise UsageError(f"{name} {value}: at least 1 is needed")
    precisions = names(flags.precision) or (["bf16"] if full else ["fp32"])
    modes = names(flags.modes)
    for flag, given, able in (("precision", precisions, ("fp32", "bf16")), ("modes", modes, ("reference", "fast"))):
        for name in given:
            if name not in able:
                raise UsageError(f"--{flag} {name}: known are {', '.join(able)}")
    small = backbone == "mini"
    datasets = names(flags.datasets) or (["photographs-102"] if full or not small else ["digits", "tiles"])
    budget = flags.budget
    if budget is None and not gpu:
        budget = 150.0 if small else 900.0
    return Settings(
        methods=tuple(method_names(flags.methods)),
        datasets=tuple(datasets),
        modes=tuple(modes),
        precisions=tuple(precisions),
        backbone=backbone,
        pretrained=pretrained,
        epochs=flags.epochs,
        steps=flags.steps,
        repeats=flags.repeats,
        batch=flags.batch,
        test_batch=flags.test_batch,
        workers=place.workers or (min(12, os.cpu_count() or 1) if gpu else 0),
        budget=budget or None,
        scaling=_scaling(flags.scaling, gpu or small),
    )


def _scaling(text: str, able: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if text == "off" or (not text and not able):
        return (), ()
    if not text:
        return CPU_SCALING
    classes, _, batches = text.partition("x")
    return tuple(numbers(classes, "--scaling", "10,50,200x4,32")), tuple(numbers(batches or "32", "--scaling"))


def measure(settings: Settings, place: Place, device: torch.device) -> dict[str, Any]:
    """Everything that `settings` asks for, as plain JSON."""
    import torch

    from benchmarks.runtime_measure import matmul_peak
    from procap.loading import load_clip

    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    load = os.getloadavg()[0]
    roots = _prepared(settings, place)
    began = time.perf_counter()
    peaks = {precision: matmul_peak(device, precision) for precision in settings.precisions}
    note(", ".join(f"matrix products at {rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in peaks.items()))
    loading = time.perf_counter()
    clip = load_clip(settings.backbone, settings.pretrained).to(device)
    loading = time.perf_counter() - loading
    report: dict[str, Any] = {
        "schema": 1,
        "command": f"procap {' '.join(sys.argv[1:])}",
        "settings": asdict(settings),
        "backbone": {"name": clip.name, "weights": clip.pretrained, "load_seconds": loading},
        "device": _device(device),
        "environment": environment(device),
        "matmul_peak": peaks,
        "rows": [],
    }
    clock = Clock(began, settings.budget)
    for number, (name, root) in enumerate(roots.items()):
        part = TABLE_SHARE / len(roots)
        ends = ((number + TRAIN_SHARE) * part, (number + 1) * part)
        report["rows"] += _contest(name, root, settings, clip, peaks, loading, clock, ends)
    report["scaling"] = [plain(one) for one in _measure_scaling(settings, clip, clock)]
    report["seconds"] = time.perf_counter() - began
    report["load_average"] = [round(load, 2), round(os.getloadavg()[0], 2)]
    return report


def plain(measured: Measured) -> dict[str, Any]:
    """A measured size as JSON."""
    return {**asdict(measured), "reached": measured.reached}


def run_config(method: str, precision: str, dataset: str, settings: Settings) -> RunConfig:
    """A run under ProCAP's recipe, so that methods differ in nothing else; batches as asked for."""
    from runner.config import plan_run

    # The data set is put in afterwards: a made-up one is unknown to the catalogue.
    config = plan_run(
        method=method,
        dataset="shapes",
        classes="all",
        shots=SHOTS,
        seed=SEED,
        backbone=settings.backbone,
        pretrained=settings.pretrained,
        precision=precision,
        recipe="procap",
        overrides={"epochs": settings.epochs, "batch_size": settings.batch, "test_batch_size": settings.test_batch},
        options=OPTIONS.get(method, {}),
    )
    return config.model_copy(update={"dataset": dataset})


@dataclass(frozen=True)
class Clock:
    """The budget: seconds that are left until a share of it is used up; None where there is no budget."""

    began: float
    budget: float | None

    def left(self, share: float = 1.0) -> float | None:
        if self.budget is None:
            return None
        return max(0.0, self.began + share * self.budget - time.perf_counter())


def _prepared(settings: Settings, place: Place) -> dict[str, Path]:
    """The folder of every data set, packed before any clock runs."""
    from benchmarks.runtime_data import dataset_of, prepare

    data = place.data_root()
    made = place.results.expanduser() / "runtime" / "data"
    return {name: prepare(name, data, made) for name in (dataset_of(name, data) for name in settings.datasets)}


def _contest(
    name: str,
    root: Path,
    settings: Settings,
    clip: CLIP,
    peaks: dict[str, float],
    loading: float,
    clock: Clock,
    ends: tuple[float, float],
) -> list[dict[str, Any]]:
    """Train and evaluate every contestant on one data set and give their rows; `ends`: shares of the clock."""
    from benchmarks.runtime_contest import Contestant
    from benchmarks.runtime_data import open_contest
    from benchmarks.runtime_rows import row

    configs = [run_config(method, p, name, settings) for p in settings.precisions for method in settings.methods]
    contest = open_contest(name, root, SHOTS, SEED, clip, configs[0].recipe)
    contestants = [
        Contestant(config, contest, clip, mode, settings.workers)  # type: ignore[arg-type]
        for config in configs
        for mode in settings.modes
    ]
    _train(contestants, settings, clock.left(ends[0]))
    passes, encoder = _evaluate(contestants, settings, clock.left(ends[1]))
    return [
        row(c, contest, settings, seen, batches, peaks[c.config.precision], loading)
        for c, seen, batches in zip(contestants, passes, encoder, strict=True)
    ]


def _train(contestants: Sequence[Contestant], settings: Settings, seconds: float | None) -> None:
    """Rounds in which every contestant takes its turn, until the training, the steps asked for or the time is over."""
    from benchmarks.runtime_measure import stretch

    able = [c for c in contestants if c.trains]
    if not able:
        return
    stream = able[0].stream
    images, labels = next(iter(_first_batch(stream)))
    on_device = images.to(able[0].device), labels.to(able[0].device)
    began = time.perf_counter()
    for contestant in able:
        with stretch(able[0].device) as timed:
            contestant.warm_up(*on_device, times=3 if able[0].device.type == "cuda" else 1)
        contestant.startup_seconds = timed.seconds
    per_step = sum(c.warmup_seconds for c in able)
    total, per_round = able[0].steps, stream.steps_per_epoch
    wanted = min(total, settings.steps or total)
    left = None if seconds is None else seconds - (time.perf_counter() - began)
    if left is not None and per_step * wanted > left:
        # Several short rounds say more than the half of a long one.
        per_round = max(1, min(per_round, int(left / per_step / FEW_ROUNDS)))
    per_round = min(per_round, wanted)
    number = 0
    while able[0].steps_done < wanted:
        for place in range(len(able)):
            able[(place + number) % len(able)].train_round(min(per_round, wanted - number * per_round))
        number += 1
        note(f"  {able[0].contest.name}: {able[0].steps_done} of {total} steps of {len(able)} trainings")
        if seconds is not None and time.perf_counter() - began > seconds:
            break
    for contestant in able:
        contestant.release()


def _first_batch(stream: Any) -> Any:
    with closing(stream.epoch(0)) as batches:
        yield next(batches)


def _evaluate(
    contestants: Sequence[Contestant], settings: Settings, seconds: float | None
) -> tuple[list[Any], list[list[float]]]:
    """Passes over the test images and repeated batches of the encoder alone, both in turns."""
    from benchmarks.runtime_contest import Passes
    from benchmarks.runtime_measure import interleaved, peak_bytes

    device, contest = contestants[0].device, contestants[0].contest
    batch = min(settings.test_batch, len(contest.test.images))
    images = _test_batch(contestants[0], batch)
    classifiers = [c.classifier() for c in contestants]
    began = time.perf_counter()
    for contestant, classify in zip(contestants, classifiers, strict=True):
        contestant.eval_peak = peak_bytes(partial(classify, images), device)
    once = max(1e-9, time.perf_counter() - began)
    times = 10 if device.type == "cuda" else 1
    rounds = settings.repeats
    if seconds is not None:
        rounds = max(1, min(rounds, int(seconds / 3 / once)))

    def several(classify: Any) -> None:
        for _ in range(times):
            classify(images)

    encoder = interleaved([partial(several, classify) for classify in classifiers], rounds, device)
    encoder = [[value / times for value in values] for values in encoder]
    wanted, per_image = len(contest.test.images), sum(min(values) for values in encoder) / batch
    per_image += len(contestants) * (contest.decode + contest.transform)
    left = None if seconds is None else seconds - (time.perf_counter() - began)
    if left is not None and per_image * wanted > left:
        wanted = max(batch, int(left / per_image) // batch * batch)
    passes = [Passes(min(wanted, len(contest.test.images))) for _ in contestants]
    for number in range(settings.repeats):
        for place in range(len(contestants)):
            turn = (place + number) % len(contestants)
            contestants[turn].evaluate_pass(passes[turn])
        if seconds is not None and time.perf_counter() - began > seconds:
            break
    return passes, encoder


def _test_batch(contestant: Contestant, batch: int) -> Tensor:
    from shards.stream import evaluation_batches
    from shards.transforms import eval_transform

    clip = contestant.method.clip
    transform = eval_transform(clip.geometry.image_size, clip.image_mean, clip.image_std)
    images, _, _ = next(evaluation_batches(contestant.contest.test.images, transform, batch, limit=batch))
    return images.to(contestant.device)


def _measure_scaling(settings: Settings, clip: CLIP, clock: Clock) -> list[Measured]:
    """The method that is compared, over classes and batches, in training and evaluation."""
    from benchmarks.runtime_scaling import Point, measure_points

    method = "procap" if "procap" in settings.methods else settings.methods[-1]
    classes, batches = settings.scaling
    points = [
        Point(kind, count, batch, precision)
        for precision in settings.precisions
        for batch in batches
        for count in classes
        for kind in ("train", "eval")
    ]
    if not points or method == "zeroshot":
        return []
    note(f"scaling of {method} with classes and images")
    seconds = clock.left()
    options = OPTIONS.get(method, {})
    return measure_points(
        clip, method, options, points, settings.repeats, SEED, seconds, lambda line: note(f"  {line}")
    )


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flags = ""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    slug = "".join(c if c.isalnum() else "-" for c in name.lower())
    return {
        "type": device.type,
        "name": name,
        "slug": slug,
        "bf16": device.type == "cuda" or any(word in flags for word in ("avx512_bf16", "amx_bf16", "asimdbf16")),
    }
