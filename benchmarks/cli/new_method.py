"""`procap new method`: write a package with a method to start from."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from benchmarks.cli.flags import OutputFlags, command, flag
from benchmarks.console.output import note, quote, show, show_json
from procap.errors import UsageError
from procap.methods import method_paths
from runner.results import write_bytes

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1"

[project.entry-points."procap.methods"]
$name = "$module:$kind"

[tool.setuptools]
py-modules = ["$module"]
"""

METHOD = '''\
"""$kind: tokens learned at the input of the image tower."""

import torch
from pydantic import BaseModel, Field
from torch import nn

from procap.clip import CLIP
from procap.methods.method import STRICT, Method, Noise
from procap.methods.prompts import ClassPrompts, tokenize_classes
from procap.plan import INPUT, NO_CHANGE, Plan, TokenOp
from procap.recipe import Recipe
from procap.text import LabelSpace


class ${kind}Options(BaseModel):
    model_config = STRICT

    n_ctx: int = Field(4, ge=1, description="tokens appended to the patches")


class $kind(Method):
    """Learn tokens at the input of the image tower; the text is that of zero-shot CLIP."""

    Options = ${kind}Options
    options: ${kind}Options
    summary = "learned tokens behind the image patches; text as in zero-shot CLIP"
    title = "$title"
    colour = "#6a3d9a"

    def __init__(self, clip: CLIP, space: LabelSpace, options: ${kind}Options, generator: torch.Generator) -> None:
        super().__init__(clip, space, options, generator)
        shape = (options.n_ctx, clip.geometry.vision_width)
        self.context = nn.Parameter(0.02 * torch.randn(shape, generator=generator))

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        return Recipe(optimizer="sgd", lr=0.0025, epochs=10, batch_size=16)

    def class_prompts(self, space: LabelSpace) -> ClassPrompts:
        return ClassPrompts(tokenize_classes(self.clip, space.names(), space.prompts(space.template)))

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        return Plan((TokenOp(INPUT, "append", self.context),)), NO_CHANGE
'''

TESTS = '''\
"""Tests of the method $name: python -m pytest."""

from benchmarks.cli import main
from procap.methods import method_options


def test_the_method_passes_all_checks():
    assert main(["check", "method", "$name"]) == 0


def test_options():
    assert method_options("$name", {"n_ctx": 2}).model_dump()["n_ctx"] == 2
'''


def install_command(folder: Path) -> str:
    """Return the command that installs a package for the Python that runs this program, by uv where it has no pip."""
    python = Path(sys.executable)
    uv = python.with_name("uv")
    program = f"{quote(uv) if uv.exists() else 'uv'} pip install --python {quote(python)}"
    if any(distributions(name="pip")):
        program = f"{quote(python)} -m pip install"
    return f"{program} --no-build-isolation -e {quote(folder)}"


@command("procap new method visual-tokens", "procap new method visual-tokens --out ~/methods")
def method(
    output: OutputFlags,
    name: Annotated[str, typer.Argument(metavar="NAME", help="lower-case letters, digits and dashes")],
    out: Annotated[Path, flag("FOLDER", "where the package's folder NAME is written")] = Path(),
) -> int:
    """Write a package with a method that works: `pyproject.toml` with the entry point, one file, and tests."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(f"a method cannot be called '{name}': lower-case letters, digits and dashes, as in my-method")
    if name in method_paths():
        raise UsageError(f"there is a method '{name}' already (procap ls methods): choose another name")
    folder, module = out / name, name.replace("-", "_")
    if find_spec(module) or any(distributions(name=name)):
        raise UsageError(f"a package '{name}' is installed, which one of this name would hide: choose another name")
    if folder.exists():
        raise UsageError(f"{folder} exists already: remove it, or name another --out")
    words = name.split("-")
    values = {
        "name": name,
        "module": module,
        "title": " ".join(words).capitalize(),
        "kind": "".join(map(str.title, words)),
    }
    files = {"pyproject.toml": PROJECT, f"{module}.py": METHOD, f"tests/test_{module}.py": TESTS}
    for file, text in files.items():
        write_bytes(folder / file, Template(text).substitute(values).encode())
        show(str(folder / file))
    note(f"next: {install_command(folder)}; procap check method {name}")
    if output.json:
        show_json({"name": name, "files": [str(folder / file) for file in files]})
    return 0
