"""Choose accelerations, none of which changes a number beyond rounding, and switch them on.

The plain path is the default; on a GPU `auto` adds what `procap check device` has measured as equal and faster.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError
from runner.config import acceleration_names
from runner.device_record import read_record
from shards.default_paths import cache_home

if TYPE_CHECKING:
    import torch

    from procap.clip import CLIP

COMPILED = ("compile", "fused")
"""Accelerations that compile kernels when they are first used."""


@dataclass(frozen=True)
class Acceleration:
    """The accelerations that are switched on.

    compile: the towers' blocks by torch.compile, whose results are cached on disk for later runs.
    graphs: training steps captured as CUDA graphs and replayed.
    images: evaluation images resized on the device.
    fused: ProCAP's cross-attention by torch.compile, level by level.
    cudnn: attention may run in cuDNN's kernels; no name of `--accelerate`: only a device record switches it on.
    record: the digest of the device record that chose them; empty if a user did, or without one.
    """

    compile: bool = False
    graphs: bool = False
    images: bool = False
    fused: bool = False
    cudnn: bool = False
    record: str = ""

    @classmethod
    def parse(cls, text: str, device: torch.device) -> Acceleration:
        """Parse `auto` (what the record of a GPU allows, none on a CPU), `off` or names with commas, for `device`.

        Raises UsageError for a chosen name that this machine cannot run; `auto` goes on without it, with a note.
        """
        gpu, is_auto = device.type == "cuda", text == "auto"
        record = read_record(device) if gpu and is_auto else None
        names = record.faster if record else acceleration_names(text)
        if gpu and is_auto and not record:
            warnings.warn("GPU: plain path; `procap check device` tests the faster ones, about a minute", stacklevel=2)
        for name in names:
            if name != "compile" and not gpu:
                raise UsageError(f"--accelerate {name} needs a CUDA device, not {device}: leave it out")
        compiled = ", ".join(sorted({*names} & {*COMPILED}))
        if compiled and (missing := missing_tool(device)):
            if not record:
                raise UsageError(f"--accelerate {compiled} needs {missing}, which is not installed: leave it out")
            warnings.warn(f"GPU: without {compiled}, which need {missing}", stacklevel=2)
            names = [name for name in names if name not in COMPILED]
        switches: dict[str, Any] = dict.fromkeys(names, True)
        return cls(record=record.digest if record else "", **switches)

    def prepare(self, clip: CLIP) -> None:
        """Switch on what concerns the towers, and off what an earlier call switched on; compiled blocks stay so."""
        import torch

        # cuDNN's default for convolutions is TF32 (ten bits of mantissa), but --precision alone chooses it.
        torch.backends.cudnn.allow_tf32 = False
        # torch 2.11 prefers cuDNN's attention on H100 and newer. It has given NaN gradients under masks of 64 keys
        # (modulo 128), and takes about a second for each new shape.
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)
        if clip.device.index is not None:
            # A GPU by number. Triton launches its kernels on the current device.
            torch.cuda.set_device(clip.device)
        if self.compile or self.fused:
            from procap.compiled import allow_programs, compile_blocks

            warnings.warn("kernels are compiled at first use, about a minute; later runs load them", stacklevel=2)
            # torch's default lies in the temporary folder, which machines empty when they start.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
            allow_programs()
            if self.compile:
                compile_blocks(clip)
        clip.fused_kernels = self.fused


def missing_tool(device: torch.device) -> str:
    """Return the tool that torch.compile needs and this machine lacks; "" if there is none."""
    # Triton compiles launchers in C; on a CPU torch.compile writes C++.
    compilers = (os.environ.get("CC", ""), "cc", "gcc", "clang") if device.type == "cuda" else ("g++", "clang++")
    if not any(name and shutil.which(name) for name in compilers):
        return "a C compiler" if device.type == "cuda" else "a C++ compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers (Python.h, in python3-dev)"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    return ""
