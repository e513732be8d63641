"""`procap new method`: write a package with a method to start from."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.flags import command, flag
from benchmarks.console.output import note, quote, show, show_json
from procap.errors import UsageError
from procap.methods import method_groups, method_paths
from runner.results import write_bytes

EXAMPLE = "methods/visual-tokens"
"""The package that is copied, below the examples of a checkout or of an installed wheel."""


@command("procap new method visual-tokens", "procap new method visual-tokens --out ~/methods")
def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="lower-case letters, digits and dashes")],
    out: Annotated[Path, flag("FOLDER", "where the package's folder NAME is written")] = Path(),
) -> int:
    """Write a package with a method that works: `pyproject.toml` with the entry point, one file, and tests."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(f"a method cannot be called '{name}': lower-case letters, digits and dashes, as in my-method")
    if name in {*method_paths(), *method_groups(), "all", "table1"}:
        raise UsageError(f"there is a method or group '{name}' already (procap ls methods): choose another name")
    folder, module = out / name, name.replace("-", "_")
    if folder.exists():
        raise UsageError(f"{folder} exists already: remove it, or name another --out")
    words = name.split("-")
    names = {
        "visual-tokens": name,
        "visual_tokens": module,
        "VisualTokens": "".join(map(str.title, words)),
        "Visual tokens": " ".join(words).capitalize(),
    }
    checkout, files = Path(__file__).parents[2] / "examples", []
    # A wheel has the examples among its data files.
    examples = checkout if checkout.is_dir() else Path(sysconfig.get_path("data")) / "share" / "procap-bench"
    for source in ("pyproject.toml", "visual_tokens.py", "tests/test_visual_tokens.py"):
        text = (examples / EXAMPLE / source).read_text(encoding="utf-8")
        for example, chosen in names.items():
            text = text.replace(example, chosen)
        files.append(folder / source.replace("visual_tokens", module))
        write_bytes(files[-1], text.encode())
        show(str(files[-1]))
    note(f"next: pip install --no-build-isolation -e {quote(folder)}; procap check method {name}")
    show_json({"name": name, "files": [str(file) for file in files]})
    return 0
