"""Ways of working that a GPU wants: compiled blocks, recorded steps, augmentation on the device.

None changes a number beyond rounding; each is a switch of its own, so that a doubt can be settled by switching it off.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from procap.errors import UsageError

if TYPE_CHECKING:
    import torch

WAYS = ("compile", "graphs", "images")


@dataclass(frozen=True)
class Acceleration:
    """Which of them are on.

    compile: the towers' blocks by torch.compile, whose results are kept on the disk for later runs.
    graphs: whole training steps and evaluated batches recorded once as CUDA graphs and replayed.
    images: training images decoded once, kept on the device, cropped and resized there.
    """

    compile: bool = False
    graphs: bool = False
    images: bool = False

    @classmethod
    def of(cls, text: str, device: torch.device) -> Acceleration:
        """What `auto`, `off` or some of `WAYS` with commas between mean on `device`.

        auto: everything that can be on a GPU, nothing on a CPU. Raises UsageError for what is unknown or cannot be.
        """
        gpu = device.type == "cuda"
        if text == "auto":
            return cls(compile=gpu and not _lacking(device), graphs=gpu, images=gpu)
        ways = [] if text == "off" else text.split(",")
        for way in ways:
            if way not in WAYS:
                raise UsageError(f"--accelerate {text}: known are auto, off, and {', '.join(WAYS)} with commas between")
        if "graphs" in ways and not gpu:
            raise UsageError(f"--accelerate graphs needs a CUDA device, not {device}: leave it out")
        if "compile" in ways and (lacking := _lacking(device)):
            raise UsageError(f"--accelerate compile needs {lacking}, which is not here: leave it out")
        return cls(**dict.fromkeys(ways, True))


def keep_compiled() -> None:
    """Let torch.compile keep its results below the cache of this program, unless the user named another folder."""
    from procap.weights.loading import procap_home

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(procap_home() / "compiled"))


def _lacking(device: torch.device) -> str:
    """What torch.compile would miss here, in words; empty where it misses nothing."""
    compilers = (os.environ.get("CC", ""), "cc", "gcc", "clang") if device.type == "cuda" else ("g++", "clang++")
    if not any(name and shutil.which(name) for name in compilers):
        return "a C compiler" if device.type == "cuda" else "a C++ compiler"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    return ""
