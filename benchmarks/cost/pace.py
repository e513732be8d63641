"""How fast a device works: seconds per counted operation, measured or assumed, and what a training step comes to.

Shapes: B images of a step, C classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from runner.config import RunConfig

if TYPE_CHECKING:
    from benchmarks.studies.scaling.model import Parts

BACKBONE, METHOD = "ViT-B-16", "maple"
"""What stands in for a backbone and a method whose operations were never counted."""
GRADIENT_PASSES, FLOAT, OPTIMIZER_BYTES = 3, 4, 28
"""As in `benchmarks.studies.scaling.model`, which cannot be imported without torch."""
FP32_SHARE = 1 / 15
"""Of a GPU's peak in bfloat16, by the data sheets of A100 and H200, what float32 reaches without TF32."""


@dataclass(frozen=True)
class Machine:
    """What a run happens on: a GPU or a processor."""

    name: str
    device: Literal["cpu", "cuda"]


def here(device: str = "auto") -> Machine:
    """This machine, looked at without torch: its first GPU, or else its processor."""
    from runner.environment import cpu_name

    gpus = [] if device.startswith("cpu") else gpu_names()
    if gpus:
        return Machine(gpus[0], "cuda")
    return Machine(cpu_name(), "cpu")


def gpu_names() -> list[str]:
    """Names of the GPUs that this process may use, none where there is no driver."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    allowed = None if shown is None else len([one for one in shown.split(",") if one.strip() not in ("", "-1")])
    # Whatever goes wrong here, training will say it where it matters.
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)][:allowed]
    return []


@dataclass(frozen=True)
class Pace:
    """Seconds that a device takes for a counted operation of each kind, and for a learnable in a step.

    launch, replay: least seconds of each operation of a step, launched from Python and replayed.
    """

    image: float
    text: float
    alike: float
    encode: float
    learnable: float
    basis: str
    launch: float = 0.0
    replay: float = 0.0


class Paces:
    """Paces of one machine, by the table of `benchmarks.cost.figures`.

    reached: the share of a GPU's peak to assume where nothing was measured; None: what the table assumes.
    """

    def __init__(self, machine: Machine, figures: Mapping[str, Any], reached: float | None = None) -> None:
        self.machine, self.figures, self._reached = machine, figures, reached
        self._known: dict[tuple[str, str], Pace] = {}

    def pace(self, config: RunConfig) -> Pace:
        """What is measured of this machine, or of the nearest one; for a GPU that nobody measured, an assumption."""
        key = (config.backbone, config.precision)
        if key not in self._known:
            self._known[key] = self._measured(*key) or self._assumed(config.precision)
        return self._known[key]

    def work(self, config: RunConfig) -> Mapping[str, Any]:
        """The counted operations of a run's step and evaluation."""
        counts = self.figures["counts"]
        methods = counts.get(config.backbone, counts[BACKBONE])
        return methods.get(config.method, methods[METHOD])

    def counted(self, config: RunConfig) -> bool:
        """Whether those are its own."""
        return config.method in self.figures["counts"].get(config.backbone, {})

    def step(self, config: RunConfig, classes: int, batch: int, ranks: int = 1) -> float:
        """Seconds of a training step of `batch` images, all ranks together."""
        if ranks > 1:
            from benchmarks.studies.scaling.model import H200, Links, step_cost

            gpu = self._accelerator()
            links = Links(**gpu["links"]) if gpu else H200.links
            return step_cost(self.parts(config, classes, batch), links, ranks).total
        return max(sum(self._seconds(config, classes, batch)), self._launches(config) * self.pace(config).replay)

    def parts(self, config: RunConfig, classes: int, batch: int) -> Parts:
        """A training step in the parts that the scaling model deals out over processes. Imports torch."""
        from benchmarks.studies.scaling.model import Parts

        work, pace = self.work(config), self.pace(config)
        image, text, alike = self._seconds(config, classes, batch)
        return Parts(
            classes=classes,
            image=image,
            text=text,
            every=alike,
            features=FLOAT * batch * work["embedding"],
            class_features=FLOAT * classes * work["embedding"],
            gradients=FLOAT * work["learnables"],
            launched=self._launches(config) * pace.launch,
            replayed=self._launches(config) * pace.replay,
        )

    def _seconds(self, config: RunConfig, classes: int, batch: int) -> tuple[float, float, float]:
        """Of images, of text, and of what all processes do alike, on one process."""
        work, pace = self.work(config), self.pace(config)
        text = (work["text"][0] + work["text"][1] * classes) * (batch if work["conditional"] else 1)
        terms = (1, batch, classes, batch * classes)
        alike = sum(count * term for count, term in zip(work["alike"], terms, strict=True))
        every = alike * pace.alike + work["learnables"] * pace.learnable
        return work["image"] * batch * pace.image, text * pace.text, every

    def _launches(self, config: RunConfig) -> int:
        launches = self.figures["launches"]
        return launches.get(config.method, launches[METHOD])

    def _measured(self, backbone: str, precision: str) -> Pace | None:
        """Of this processor, or of another one; of this GPU. Its nearest backbone and precision stand in for others."""
        gpu = self.machine.device == "cuda"
        devices = [one for one in self.figures["devices"] if one["device"] == self.machine.device and one["rates"]]
        devices = [one for one in devices if not gpu or one["name"] == self.machine.name]
        if not devices:
            return None
        device = min(devices, key=lambda one: one["name"] != self.machine.name)
        rate = min(
            device["rates"],
            key=lambda one: (one["backbone"] != backbone, one["precision"] != precision, one["backbone"] != BACKBONE),
        )
        where = device["name"] if gpu else f"{device['name']}, {device['cores']} cores"
        basis = f"scaled from {rate['backbone']} in {rate['precision']} on {where}"
        return Pace(rate["image"], rate["text"], rate["text"], rate["encode"], rate["learnable"], basis)

    def _assumed(self, precision: str) -> Pace:
        """Counted operations at a share of a GPU's peak."""
        gpu = self._accelerator()
        assert gpu is not None
        share = (self._reached or gpu["reached"]) * (FP32_SHARE if precision == "fp32" else 1.0)
        each = 1 / (gpu["flops"] * share)
        moved = (GRADIENT_PASSES * FLOAT + OPTIMIZER_BYTES) / (gpu["memory"] * gpu["memory_reached"])
        basis = f"assumed: counted operations at {100 * share:.2g} % of {gpu['name']}'s peak"
        return Pace(each, each, each, each, moved, basis, gpu["launch"], gpu["replay"])

    def _accelerator(self) -> Mapping[str, Any] | None:
        """The data sheet of a GPU of this name, else of the slowest one known."""
        if self.machine.device != "cuda":
            return None
        gpus = self.figures["accelerators"]
        named = (gpu for gpu in gpus if gpu["name"].lower() in self.machine.name.lower())
        return next(named, min(gpus, key=lambda gpu: gpu["flops"]))
