"""Train, evaluate and use few-shot CLIP methods from Python.

    import procap

    run = procap.train(method="probe", dataset="digits", classes="all", shots=16)
    print(procap.evaluate(run, "digits").accuracy)
    frame = procap.load_results("results")

Names are imported when they are used, so that `import procap` costs nothing. The methods themselves, a frozen CLIP that
plans change, their losses and kernels, are in the packages below: `procap.methods`, `procap.weights`, `procap.plan`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.results import load as load_results
    from runner.api import Run, Session, evaluate, features, pack, train
    from runner.predict import ImageClassifier as Classifier

__version__ = "0.1.0"
__all__ = ["Classifier", "Run", "Session", "evaluate", "features", "load_results", "pack", "train"]

ATTRIBUTES = {
    **dict.fromkeys(("Run", "Session", "evaluate", "features", "pack", "train"), "runner.api"),
    "Classifier": "runner.predict:ImageClassifier",
    "load_results": "benchmarks.results:load",
}


def __getattr__(name: str) -> object:
    if name not in ATTRIBUTES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = ATTRIBUTES[name].partition(":")
    # Each imports those before it.
    packages = ("shards", "runner", "benchmarks")
    for package in packages[: packages.index(module.partition(".")[0]) + 1]:
        file = Path(getattr(find_spec(package), "origin", None) or package).resolve()
        if Path(__file__).resolve().parents[1] not in file.parents:
            raise ImportError(f"{file} hides the package {package!r} of procap.{name}: rename it, or work elsewhere")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
