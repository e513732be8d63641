"""Learnable copies of a tower's own weights, which replace them in a plan (`Plan.weights`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from procap.plan import BLOCKS


class WeightOverrides(nn.Module):
    """Copies of the weights of `tower` called `names`; the shared frozen tower stays as it is.

    A parameter's name may not contain dots, so its name here has slashes in their place.
    """

    def __init__(self, tower: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        weights = dict(tower.named_parameters())
        for name in names:
            self.register_parameter(name.replace(".", "/"), nn.Parameter(weights[name].detach().clone()))

    def weights(self) -> dict[str, Tensor]:
        """Return the copies by their names in the tower, as a plan takes them."""
        return {name.replace("/", "."): parameter for name, parameter in self.named_parameters()}


def upper_names(tower: nn.Module, first: int, others: Sequence[str]) -> list[str]:
    """List the weights of a tower's blocks from `first` on and of the parts called `others`."""
    names = [name for name, _ in tower.named_parameters()]
    blocks = [name for name in names if name.startswith(BLOCKS)]
    upper = [name for name in blocks if int(name.removeprefix(BLOCKS).partition(".")[0]) >= first]
    return upper + [name for name in names if name.startswith(tuple(others))]
