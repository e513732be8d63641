"""The house stands: a file imports its own floor and the floors below, and heavy libraries only where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOOR = {"procap": 0, "shards": 1, "runner": 2, "cluster": 3, "benchmarks": 4}
HEAVY = {"ray", "mlflow", "deepspeed", "matplotlib", "optuna", "sklearn"}
FILES = sorted(path for package in FLOOR for path in (ROOT / package).rglob("*.py"))


def parsed() -> Iterator[tuple[str, str, ast.Module]]:
    """Every file of the program: its package, its path and its code."""
    assert len(FILES) > 300
    for path in FILES:
        name = path.relative_to(ROOT)
        yield name.parts[0], str(name), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Every imported module of a file: its dotted name, line, and whether the import runs when the file is imported."""
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
            # A relative import would hide the floor: it is reported as one that is allowed nowhere.
            yield str(node.module) if node.level == 0 else ".", node.lineno, runs


def allowed(here: str, imported: str) -> bool:
    if imported == "":
        return False
    if imported not in FLOOR or here == imported:
        return True
    return FLOOR[imported] < FLOOR[here] and (here, imported) != ("shards", "procap")


def early(tree: ast.Module) -> list[str]:
    """Heavy libraries that are imported with the file."""
    return [f"line {line}: {name}" for name, line, runs in imports(tree) if runs and name.split(".")[0] in HEAVY]


def unsafe(tree: ast.Module) -> list[str]:
    """Calls that may run code from a file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads")]
    safe = {"weights_only=True"}
    return [f"line {call.lineno}" for call in loads if not safe & {ast.unparse(word) for word in call.keywords}]


def test_imports_only_lower_floors() -> None:
    upward = [
        f"{name}:{line}: {imported}"
        for here, name, tree in parsed()
        for imported, line, _ in imports(tree)
        if not allowed(here, imported.split(".")[0])
    ]
    assert not upward


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    assert not {name: found for _, name, tree in parsed() if (found := early(tree))}


def test_nothing_is_unpickled_freely() -> None:
    assert not {name: found for _, name, tree in parsed() if (found := unsafe(tree))}


def test_the_rules_catch_what_they_should() -> None:
    assert not allowed("shards", "procap") and not allowed("procap", "shards") and not allowed("runner", "cluster")
    assert allowed("runner", "shards") and allowed("runner", "procap") and allowed("benchmarks", "cluster")
    assert [allowed("cluster", name.split(".")[0]) for name, *_ in imports(ast.parse("from .site import nodes"))] == [
        False
    ]
    assert early(ast.parse("import ray")) and early(ast.parse("if here:\n    from ray import tune"))
    assert not early(ast.parse("def work():\n    import ray"))
    assert not early(ast.parse("if TYPE_CHECKING:\n    import ray"))
    assert unsafe(ast.parse("torch.load(file)")) and unsafe(ast.parse("pickle.load(file)"))
    assert not unsafe(ast.parse("torch.load(file, weights_only=True)"))


def test_every_folder_of_code_is_installed() -> None:
    """A folder without __init__.py can be imported here, where the working tree is, and from no wheel."""
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
