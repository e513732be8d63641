"""What estimates of cost rest on: counted operations, and the measured figures of `docs/results`, as one table.

    python -m benchmarks.cost.figures        renews benchmarks/cost/figures.json after new figures were recorded

The table is installed with the program, `docs/results` is not. Reading it needs no torch, so that planning is
quick. Shapes: B images, C classes.

counts, of a backbone and a method: operations of a training step are `image` B + (`text`[0] + `text`[1] C), and these
once per image where `conditional` + (`alike` . 1, B, C, B C); those of an evaluation `encode` per image, `logits` per
image and class, and `classes`[0] + `classes`[1] C once, or per image where `conditional`. `learnables`: parameters.
launches: operations that a step launches one by one.
rates, of a device, a backbone and a precision: seconds per operation of images, text and evaluation, and per learnable,
fitted to the measured steps; `worst` is the largest relative error of the fit.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("figures.json")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
RUNTIME = ("runtime-mini.json", "runtime-full-size.json")
BACKBONES = ("mini", "ViT-B-32", "ViT-B-16", "ViT-L-14")
METHODS = ("zeroshot", "coop", "cocoop", "maple", "procap")
FEW, MANY = 10, 500
SMALL = 4


def read() -> dict[str, Any]:
    """The installed table."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def collect(results: Path = RESULTS) -> dict[str, Any]:
    """The table, counted and read anew."""
    counts = {backbone: {method: counted(backbone, method) for method in METHODS} for backbone in BACKBONES}
    scaling = json.loads((results / "scaling.json").read_text(encoding="utf-8"))
    return {"counts": counts, "launches": _launches(scaling["estimates"]), **measured(counts, results)}


def measured(counts: Mapping[str, Any], results: Path = RESULTS) -> dict[str, Any]:
    """What the table has from recorded figures, given its counted operations."""
    runtime = [json.loads((results / name).read_text(encoding="utf-8")) for name in RUNTIME]
    scaling = json.loads((results / "scaling.json").read_text(encoding="utf-8"))
    loader = json.loads((results / "loader.json").read_text(encoding="utf-8"))
    return {
        "devices": _devices(runtime, counts),
        "accelerators": [gpu for gpu in scaling["gpus"] if "Ethernet" not in gpu["name"]],
        "decode": _decode(runtime, loader["rows"]),
        "published": _published(runtime[0]["published"], counts),
    }


def counted(backbone: str, method: str) -> dict[str, Any]:
    """Operations of a method on a backbone, as the table has them."""
    from benchmarks.cost.flops import evaluation, image_work, logit_work, own_work, text_work
    from benchmarks.runtime.scaling import made_up

    clip = _clip(backbone)
    geometry, savings = clip.geometry, clip.savings

    def at(classes: int) -> tuple[float, float, dict[int, float], float, float]:
        built, _, _ = made_up(clip, method, classes, 1)
        images, texts = built.plans(built.prompts)
        prompts = built.prompts.tokenized
        alike = {
            batch: (own_work(built, batch, classes, train=True) + logit_work(built, batch, classes, train=True)).total
            for batch in (1, 2)
        }
        trained = text_work(geometry, prompts, texts, savings, train=True).total
        read = text_work(geometry, prompts, texts, savings, train=False).total
        image = image_work(geometry, images, 1, savings, train=True).total
        encode = evaluation(built, 1, every_batch=False).total - logit_work(built, 1, classes, train=False).total
        return image, trained, alike, read, encode

    image, text, alike, classes, encode = at(FEW)
    _, more_text, more_alike, more_classes, _ = at(MANY)
    per_image = {count: work[2] - work[1] for count, work in ((FEW, alike), (MANY, more_alike))}
    both = (per_image[MANY] - per_image[FEW]) / (MANY - FEW)
    image_alone = per_image[FEW] - both * FEW
    classes_alone = (more_alike[1] - alike[1]) / (MANY - FEW) - both
    built, _, _ = made_up(clip, method, 2, 1)
    conditional = hasattr(built, "meta_net")
    trains = method != "zeroshot"
    return {
        "image": image if trains else 0.0,
        "text": _line(text, more_text) if trains else [0.0, 0.0],
        "alike": [alike[1] - image_alone - (classes_alone + both) * FEW, image_alone, classes_alone, both],
        "encode": _image_alone(geometry, savings, built) if conditional else encode,
        "classes": _line(classes, more_classes),
        "logits": 2.0 * geometry.embed_dim,
        "learnables": sum(parameter.numel() for parameter in built.parameters()),
        "embedding": geometry.embed_dim,
        "conditional": conditional,
    }


def _image_alone(geometry: Any, savings: Any, built: Any) -> float:
    from benchmarks.cost.flops import image_work

    return image_work(geometry, built.plans(built.prompts)[0], 1, savings, train=False).total


def _line(few: float, many: float) -> list[float]:
    """Intercept and slope through what `FEW` and `MANY` classes take; the few have the shorter names."""
    slope = (many - few) / (MANY - FEW)
    return [max(0.0, few - slope * FEW), slope]


def _clip(backbone: str) -> Any:
    from benchmarks.studies.scaling.model import VIT_B_16, shapes_of
    from procap.weights.mini import load_mini

    large = replace(VIT_B_16, vision_width=1024, vision_layers=24, vision_heads=16, text_width=768, text_heads=12)
    geometries = {
        "ViT-B-16": VIT_B_16,
        "ViT-B-32": replace(VIT_B_16, patch_size=32),
        "ViT-L-14": replace(large, patch_size=14, embed_dim=768),
    }
    return load_mini() if backbone == "mini" else shapes_of(geometries[backbone])


def _launches(estimates: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    from benchmarks.studies.scaling.benchmark import launched

    known = {one["method"]: one["launches"] for one in estimates}
    return {method: known.get(method) or launched(method) for method in METHODS if method != "zeroshot"}


def _devices(runtime: Iterable[Mapping[str, Any]], counts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per device that was measured, whichever files its figures are in."""
    devices: dict[str, dict[str, Any]] = {}
    for report in runtime:
        machine, kind = report["environment"], report["device"]["type"]
        name = machine["gpu"] if kind == "cuda" else machine["cpu"]["name"]
        entry = devices.setdefault(
            name, {"name": name, "device": kind, "cores": machine["cpu"]["cores"], "peaks": {}, "steps": [], "fps": []}
        )
        entry["peaks"] |= report["matmul_peak"]
        entry["steps"] += _steps(report)
        entry["fps"] += [
            {"backbone": report["backbone"]["name"], "seconds": 1 / row["encoder_fps"]["median"]}
            | {name: row[name] for name in ("method", "precision", "classes")}
            for row in report["rows"]
            if row["mode"] == "fast"
        ]
    for entry in devices.values():
        entry["rates"] = _rates(entry["steps"], entry.pop("fps"), counts)
    return list(devices.values())


def _steps(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measured seconds of training steps and evaluated batches in fast mode."""
    found = [
        {"kind": one["point"]["kind"], "backbone": one["backbone"], "method": one["method"]}
        | {name: one["point"][name] for name in ("precision", "classes", "batch")}
        | {"seconds": one["seconds"]["fast"]["median"]}
        for one in report["scaling"]
    ]
    found += [
        {"kind": "train", "backbone": report["backbone"]["name"], "method": row["method"]}
        | {name: row[name] for name in ("precision", "classes", "batch")}
        | {"seconds": row["step_seconds"]["median"]}
        for row in report["rows"]
        if row["mode"] == "fast" and row["step_seconds"]
    ]
    return found


def _rates(
    steps: Iterable[Mapping[str, Any]], passes: Iterable[Mapping[str, Any]], counts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for step in steps:
        groups.setdefault((step["backbone"], step["precision"]), []).append(step)
    alone = [{**one, "kind": "eval", "batch": 1} for one in passes]
    found = []
    for (backbone, precision), mine in groups.items():
        mine = [*mine, *(one for one in alone if (one["backbone"], one["precision"]) == (backbone, precision))]
        train = [one for one in mine if one["kind"] == "train"]
        # Small batches are no measure of how fast many images go.
        tested = [one for one in mine if one["kind"] == "eval" and one["batch"] != SMALL]
        spent = [one["seconds"] / one["batch"] / counts[backbone][one["method"]]["encode"] for one in tested]
        fitted, worst = _fitted(train, counts[backbone])
        # A precision of which no evaluation was measured: forward passes go at the pace of training's images.
        encode = statistics.median(spent) if spent else fitted[0]
        names = dict(zip(("image", "text", "learnable"), fitted, strict=True))
        methods = sorted({one["method"] for one in mine})
        about = {"backbone": backbone, "precision": precision, "methods": methods}
        found.append({**about, **names, "encode": encode, "worst": worst})
    return found


def _fitted(steps: list[Mapping[str, Any]], counts: Mapping[str, Any]) -> tuple[list[float], float]:
    """Seconds per operation of images and of text, and per learnable, that fit best; none below zero.

    With fewer steps than three one pace must do for everything. Relative errors count, so that short steps do too.
    """
    import numpy as np
    from scipy.optimize import nnls

    rows = []
    for step in steps:
        work = counts[step["method"]]
        text = (work["text"][0] + work["text"][1] * step["classes"]) * (step["batch"] if work["conditional"] else 1)
        rows.append([work["image"] * step["batch"], text, work["learnables"]])
    seconds = np.array([step["seconds"] for step in steps])
    table = np.array(rows) / seconds[:, None]
    if len(steps) < table.shape[1]:
        pace = 1 / np.median(table[:, 0] + table[:, 1])
        fitted = np.array([pace, pace, 0.0])
    else:
        # Columns of like size: a solver's tolerance is an absolute one.
        scale = table.max(axis=0)
        fitted = nnls(table / scale, np.ones(len(steps)))[0] / scale
    return [float(one) for one in fitted], float(np.abs(table @ fitted - 1).max())


def _decode(runtime: Iterable[Mapping[str, Any]], loader: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of one core for an image: read, decoded and transformed for evaluation, and augmented in training."""
    rows = [row for report in runtime for row in report["rows"] if row["mode"] == "fast"]
    rates = {(row["name"], row["what"]): row["images_per_second"] for row in loader}
    small = [
        (row["phases"]["evaluation_decode"] + row["phases"]["evaluation_transform"]) / row["test_images"]
        for row in rows
    ]
    seen = [row["phases"]["augment"] / (row["steps_measured"] * row["batch"]) for row in rows if row["steps_measured"]]
    return {
        "photograph": 1 / rates["streaming evaluation", "no workers"],
        "photograph_again": 1 / rates["cached training", "no workers"],
        "small": statistics.median(small),
        "small_again": statistics.median(seen),
    }


def _published(rows: Iterable[Mapping[str, str]], counts: Mapping[str, Any]) -> dict[str, Any]:
    """What the paper's own code reached on its GPU, an A100: counted operations of this program's step by its time."""
    classes, epochs, batch, found = {"Flowers102": 102, "UCF101": 101}, 10, 32, []
    for row in rows:
        work = counts["ViT-B-16"]["maple" if "MaPLe" in row["method"] else "procap"]
        step = work["image"] * batch + work["text"][0] + work["text"][1] * classes[row["dataset"]]
        steps = epochs * 16 * classes[row["dataset"]] / batch
        seconds, image = float(row["time_s"]) / steps, 1 / float(row["fps"])
        about = {"dataset": row["dataset"], "method": row["method"]}
        found.append({**about, "step_seconds": seconds, "flops": step / seconds, "image_seconds": image})
    medians = {name: statistics.median(one[name] for one in found) for name in ("flops", "image_seconds")}
    return {"device": "A100", "rows": found, **medians}


def main() -> int:
    """Write the table beside this file."""
    from runner.results import write_json

    write_json(FILE, collect())
    print(f"{FILE} is made of {', '.join(RUNTIME)}, scaling.json and loader.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
