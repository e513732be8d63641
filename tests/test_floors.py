"""The house stands: a file imports its own floor and the floors below, and heavy libraries only where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOOR = {"procap": 0, "shards": 1, "runner": 2, "cluster": 3, "benchmarks": 4}
HEAVY = {"ray", "mlflow", "deepspeed", "matplotlib", "optuna", "sklearn"}
FILES = sorted(path for package in FLOOR for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every imported module of a file: its dotted name, line, and whether the import runs when the file is imported."""
    tree = ast.parse(path.read_text())
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    checked_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        runs = id(node) not in inside_functions and id(node) not in checked_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, runs
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the floor"
            yield str(node.module), node.lineno, runs


def allowed(here: str, imported: str) -> bool:
    if imported not in FLOOR or here == imported:
        return True
    return FLOOR[imported] < FLOOR[here] and (here, imported) != ("shards", "procap")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_lower_floors(path: Path) -> None:
    here = path.relative_to(ROOT).parts[0]
    upward = [f"line {line}: {name}" for name, line, _ in imports(path) if not allowed(here, name.split(".")[0])]
    assert not upward, f"{here} is floor {FLOOR[here]}: {upward}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_are_imported_where_they_are_used(path: Path) -> None:
    early = [f"line {line}: {name}" for name, line, runs in imports(path) if runs and name.split(".")[0] in HEAVY]
    assert not early, early


def test_rule_catches_what_it_should() -> None:
    assert not allowed("shards", "procap") and not allowed("procap", "shards") and not allowed("runner", "cluster")
    assert allowed("runner", "shards") and allowed("runner", "procap") and allowed("benchmarks", "cluster")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_freely(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            assert safe, f"{path.name}:{node.lineno}: {ast.unparse(node.func)} may run code from a file"


def test_every_package_is_installed() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for folder in {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in FILES}:
        assert f'"{folder}"' in project, f"{folder} is not among the packages of pyproject.toml"
