"""Choose accelerations, none of which changes a number beyond rounding, and switch them on.

The plain path is the default; on a GPU `auto` adds what `procap check device` has measured as equal and faster.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from procap.errors import UsageError
from runner.config import acceleration_names
from runner.device_record import read_record
from shards.default_paths import cache_home

if TYPE_CHECKING:
    import torch

    from procap.clip import CLIP


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

        Raises UsageError for a name that needs a GPU where there is none.
        """
        gpu, record, names = device.type == "cuda", "", acceleration_names(text)
        if gpu and text == "auto":
            if stored := read_record(device):
                names, record = stored.faster, stored.digest
            else:
                what = "plain path; `procap check device` tests the faster ones, about a minute"
                warnings.warn(f"GPU: {what}", stacklevel=2)
        for name in ("graphs", "fused"):
            if name in names and not gpu:
                raise UsageError(f"--accelerate {name} needs a CUDA device, not {device}: leave it out")
        switches: dict[str, Any] = dict.fromkeys(names, True)
        return cls(record=record, **switches)

    def prepare(self, clip: CLIP) -> None:
        """Switch on what concerns the towers, and off what an earlier call switched on; compiled blocks stay so."""
        if clip.device.type == "cuda":
            import torch

            # cuDNN's default for convolutions is TF32 (ten bits of mantissa), but --precision alone chooses it.
            torch.backends.cudnn.allow_tf32 = False
            if clip.device.index is not None:
                # Triton launches its kernels on the current device.
                torch.cuda.set_device(clip.device)
            if self.compile or self.fused:
                what = "kernels are compiled at their first use, about a minute; later runs load them"
                warnings.warn(f"GPU: {what}", stacklevel=2)
            # torch 2.11 prefers cuDNN's attention on H100 and newer. It has given NaN gradients under masks of 64 keys
            # (modulo 128), and takes about a second for each new shape.
            torch.backends.cuda.enable_cudnn_sdp(self.cudnn)
        if self.compile or self.fused:
            from procap.compiled import allow_programs, compile_blocks

            # torch's default lies in the temporary folder, which machines empty when they start.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
            allow_programs()
            if self.compile:
                compile_blocks(clip)
        clip.fused_kernels = self.fused
