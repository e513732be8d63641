"""Casts of the frozen weights of the towers' blocks that are made once instead of in every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from procap.attention import Block
from procap.clip import CLIP


class FrozenCasts:
    """Weights of `clip` in the type of autocast, for steps and batches within `applied`.

    Autocast keeps the cast of a weight only if the weight is learned, so it casts each frozen one in each step. The
    results are equal bit for bit. The bias before QuickGELU stays: it is scaled in float32 before its cast.
    """

    def __init__(self, clip: CLIP) -> None:
        self._clip = clip
        self._type: tuple[torch.device, torch.dtype] | None = None
        self._casts: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the weights by their casts within the block; without autocast nothing is replaced."""
        device = self._clip.device
        if not torch.is_autocast_enabled(device.type):
            yield
            return
        if self._type != (device, dtype := torch.get_autocast_dtype(device.type)):
            self._type, self._casts = (device, dtype), list(self._cast(dtype))
        try:
            for module, name, _, cast in self._casts:
                module._parameters[name] = cast  # type: ignore[assignment]
            yield
        finally:
            # Also after an error, because all methods of the process share these modules.
            for module, name, weight, _ in self._casts:
                module._parameters[name] = weight  # type: ignore[assignment]

    def _cast(self, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, Tensor, Tensor]]:
        # The first use can be an evaluation, and training cannot use tensors made in inference mode.
        with torch.inference_mode(False):
            for block in (module for module in self._clip.modules() if isinstance(module, Block)):
                attention, mlp = block.attn, block.mlp
                names = [(attention, "in_proj_weight"), (attention, "in_proj_bias"), (mlp.c_fc, "weight")]
                names += [(layer, name) for layer in (attention.out_proj, mlp.c_proj) for name in ("weight", "bias")]
                for module, name in names:
                    weight = getattr(module, name)
                    yield module, name, weight, nn.Parameter(weight.detach().to(dtype), requires_grad=False)
