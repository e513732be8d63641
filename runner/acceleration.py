"""Choose accelerations for GPUs and switch them on; none changes a number beyond rounding."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from procap.errors import UsageError
from shards.default_paths import cache_home

if TYPE_CHECKING:
    import torch

    from procap.clip import CLIP

NAMES = ("compile", "graphs", "images")
OPTIONAL = ("weights", "streams", "padding", "ranks")
"""Accelerations that `auto` leaves out, because no GPU has measured them."""
KEY_MULTIPLE = 16
"""Keys per row of a mask that fused attention takes as it is; it copies and pads other masks."""


def acceleration_names(text: str) -> list[str]:
    """Split `auto`, `off` or names with commas between; the first two name none. Raises UsageError."""
    names = [] if text in ("auto", "off") else text.split(",")
    known = (*NAMES, *OPTIONAL)
    if not {*names} <= {*known}:
        raise UsageError(f"--accelerate {text}: known are auto, off, and {', '.join(known)} with commas between")
    return names


@dataclass(frozen=True)
class Acceleration:
    """The accelerations that are switched on.

    compile: the towers' blocks by torch.compile, whose results are cached on disk for later runs.
    graphs: training steps and evaluated batches captured as CUDA graphs and replayed.
    images: training images decoded once, kept on the device, cropped and resized there; on a GPU evaluation images
        are resized there too.
    weights: under bf16 and fp16 frozen weights are kept in that type instead of cast in each step.
    streams: classes are encoded on a second stream of the GPU while images are encoded.
    padding: keys of text are padded to a multiple of `KEY_MULTIPLE`, as fused attention would do in each block.
    ranks: several ranks average all gradients in one message after the backward pass, instead of by DDP, so that
        CUDA graphs can hold their steps.
    """

    compile: bool = False
    graphs: bool = False
    images: bool = False
    weights: bool = False
    streams: bool = False
    padding: bool = False
    ranks: bool = False

    @classmethod
    def parse(cls, text: str, device: torch.device) -> Acceleration:
        """Parse `auto` (all `NAMES` on a GPU, none on a CPU), `off` or names with commas between, for `device`."""
        gpu = device.type == "cuda"
        names = [*NAMES] if text == "auto" and gpu else acceleration_names(text)
        if "graphs" in names and not gpu:
            raise UsageError(f"--accelerate graphs needs a CUDA device, not {device}: leave it out")
        if "compile" in names and (missing := _missing_tool(device)):
            raise UsageError(f"--accelerate compile needs {missing}, which is not installed: use images without it")
        return cls(**dict.fromkeys(names, True))

    def prepare(self, clip: CLIP) -> None:
        """Switch on what concerns the towers, and off what an earlier call switched on; compiled blocks stay so."""
        if self.compile:
            from procap.kernels.compiled import compile_blocks

            # torch's default lies in the temporary folder, which machines empty when they start.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
            compile_blocks(clip)
        clip.weights_in_use = nullcontext
        if self.weights:
            from procap.kernels.frozen_casts import FrozenCasts

            clip.weights_in_use = FrozenCasts(clip).applied
        clip.text.key_multiple = KEY_MULTIPLE if self.padding else 1
        clip.text_stream = None
        if self.streams and clip.device.type == "cuda":
            from torch.cuda import Stream

            clip.text_stream = Stream(clip.device)


def _missing_tool(device: torch.device) -> str:
    """Return the tool that torch.compile needs and this machine lacks; "" if there is none."""
    # Triton compiles launchers in C; on a CPU torch.compile writes C++.
    compilers = (os.environ.get("CC", ""), "cc", "gcc", "clang") if device.type == "cuda" else ("g++", "clang++")
    if not any(name and shutil.which(name) for name in compilers):
        return "a C compiler" if device.type == "cuda" else "a C++ compiler"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    return ""
