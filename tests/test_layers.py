"""Layers: a module imports lower layers only, no imports form a cycle, heavy libraries are imported in functions."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"procap": 0, "shards": 1, "runner": 2, "cluster": 3, "benchmarks": 4}
INSIDE = {
    "console": 0, "experiment": 1, "results": 2, "tables": 3, "plots": 4, "suites": 5, "runtime": 6, "qualitative": 6,
    "sweeps": 6, "device_check": 7, "report": 7, "cli": 8,
}  # fmt: skip
"""The layers of `benchmarks/`; packages of one layer do not import each other."""
HEAVY = {"ray", "mlflow", "deepspeed", "matplotlib", "optuna", "sklearn", "scipy", "pandas"}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree, at_top=True):
    """Every imported name of a file, as a dotted path, with its line and whether it is imported with the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_top
        elif isinstance(node, ast.ImportFrom):
            # A relative import hides its layer and is reported as an import of ".".
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if node.level == 0 else ".", node.lineno, at_top
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(node)
            yield from imports(node, at_top and not lazy)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def imported_modules(name: str) -> set[str]:
    """The modules of this program that a module imports, at its top, inside functions or for type checking."""
    found = set()
    for imported, _, _ in imports(parse(MODULES[name])):
        module = imported if imported in MODULES else imported.rpartition(".")[0]
        if module in MODULES and module != name:
            found.add(module)
    return found


def layer(module: str) -> tuple[int, int]:
    """The layer of a module and, in `benchmarks`, the one of its package; its own files belong to the lowest."""
    package, _, rest = module.partition(".")
    return PACKAGES[package], INSIDE.get(rest.partition(".")[0], 0) if package == "benchmarks" else 0


def is_allowed(importing: str, imported: str) -> bool:
    here, there = importing.split(".")[:2], imported.split(".")[:2]
    if importing == "procap":
        # What users import, resolved when it is used.
        return imported in ("runner.api", "runner.predict", "benchmarks.results")
    if (here[0], there[0]) == ("shards", "procap"):
        # The two lower packages are independent, but for the errors that a user can mend.
        return there[1:] == ["errors"]
    if here[0] != there[0]:
        return layer(imported) < layer(importing)
    if here[0] != "benchmarks" or here == there:
        return True
    return layer(imported) < layer(importing)


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One group of modules that import each other in a circle, the first named again at the end; [] without any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def early(tree: ast.Module) -> list[str]:
    return [f"line {line}: {name}" for name, line, at_top in imports(tree) if at_top and name.split(".")[0] in HEAVY]


def unsafe(tree: ast.Module) -> list[str]:
    """Calls that may run code from a file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads")]
    return [f"line {c.lineno}" for c in loads if "weights_only=True" not in {ast.unparse(word) for word in c.keywords}]


def test_modules_import_lower_layers_only():
    assert len(FILES) > 200
    found = {(name, other) for name in MODULES for other in imported_modules(name) if not is_allowed(name, other)}
    found |= {(name, ".") for name, path in MODULES.items() if "." in {module for module, _, _ in imports(parse(path))}}
    assert not found, "\n".join(f"{a} -> {b}" for a, b in sorted(found))


def test_no_modules_import_each_other_in_a_cycle():
    found = find_cycle({name: imported_modules(name) for name in MODULES})
    assert not found, " < ".join(found)


def test_every_imported_name_exists():
    """Also where the import is inside a function, which no other check of the default suite would reach."""
    missing = []
    for name, path in MODULES.items():
        for imported, line, _ in imports(parse(path)):
            module, _, attribute = imported.rpartition(".")
            ours = imported.split(".")[0] in PACKAGES
            if ours and imported not in MODULES and not hasattr(import_module(module), attribute):
                missing.append(f"{name}:{line}: {imported}")
    assert not missing, "\n".join(missing)


def test_no_command_imports_another():
    from benchmarks.cli.app import HEADINGS

    places = [place for commands in HEADINGS.values() for place, _ in commands.values()]
    places += [place for group in places if isinstance(group, dict) for place, _ in group.values()]
    commands = {place.partition(":")[0] for place in places if isinstance(place, str)}
    assert len(commands) > 15
    assert not {name: both for name in commands if (both := imported_modules(name) & commands)}


def test_every_folder_of_benchmarks_has_a_layer():
    folders = {path.parent.relative_to(ROOT / "benchmarks").parts[0] for path in (ROOT / "benchmarks").glob("*/*.py")}
    assert folders <= set(INSIDE)


def test_tools_and_examples_are_imported_by_nothing():
    outside = {"tools", "examples", "tests"}
    for name, path in MODULES.items():
        assert not outside & {imported.partition(".")[0] for imported, *_ in imports(parse(path))}, name


def test_heavy_libraries_are_imported_where_they_are_used():
    assert not {name: found for name, path in MODULES.items() if (found := early(parse(path)))}


def test_nothing_is_unpickled_freely():
    assert not {name: found for name, path in MODULES.items() if (found := unsafe(parse(path)))}


def test_the_rules_catch_what_they_should():
    assert not is_allowed("shards.pack", "procap.clip") and not is_allowed("runner.train", "cluster.launcher")
    assert is_allowed("shards.pack", "procap.errors")
    assert is_allowed("runner.train", "shards.pack") and is_allowed("benchmarks.cli.demo", "cluster.launcher")
    assert not is_allowed("benchmarks.tables.plain", "benchmarks.suites.plans")
    assert not is_allowed("benchmarks.runtime.case", "benchmarks.qualitative.learned_prompts")
    assert [name for name, *_ in imports(ast.parse("from .site import nodes"))] == ["."]
    assert {*find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})} == {"a", "b", "c"}
    assert not find_cycle({"a": {"b"}, "b": {"c"}, "c": set()})
    assert early(ast.parse("import ray")) and early(ast.parse("if here:\n    from ray import tune"))
    assert not early(ast.parse("def work():\n    import ray"))
    assert not early(ast.parse("if TYPE_CHECKING:\n    import ray"))
    assert unsafe(ast.parse("torch.load(file)")) and unsafe(ast.parse("pickle.load(file)"))
    assert not unsafe(ast.parse("torch.load(file, weights_only=True)"))


def test_every_folder_of_code_is_installed():
    """A folder without __init__.py can be imported here, where the working tree is, and from no wheel."""
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
