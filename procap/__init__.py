"""The method library: a frozen CLIP that plans change (`procap.plan`), the prompt methods, their losses.

It does not depend on data sets or runs. Heavy modules are imported on use, so that `import procap` costs nothing:

    from procap.weights.loading import load_clip
    from procap.methods import METHODS, build_method
    from procap.text import LabelSpace

`procap.Session` trains and evaluates runs (`runner.api`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.api import Session as Session

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Session":
        from runner.api import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
