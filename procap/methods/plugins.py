"""Find methods of other packages, identify the code of methods, and name the place of an error in it.

Nothing here imports a plug-in.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

GROUP = "procap.methods"
COMPILERS = ("triton", "torch._inductor", "torch._dynamo")


class MethodSource(BaseModel):
    """The code of a method: runs of equal sources were trained by the same statements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str = Field(description="of a plug-in's package; empty for a built-in method")
    digest: str = Field(description="see `code_digest`")

    def __str__(self) -> str:
        return f"{self.package} {self.version}".strip() + f" (source {self.digest})"


def find_plugins() -> dict[str, EntryPoint]:
    """Return the entry points of methods of all installed packages by name."""
    changed = [(path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.exists(path)]
    return _find_plugins(tuple(changed))


@functools.cache
def _find_plugins(path: tuple[tuple[str, int], ...]) -> dict[str, EntryPoint]:
    # Reading the entry points of all packages takes long, and tables need those of each run. Installing a package
    # changes the time of a folder on the path.
    return {point.name: point for point in entry_points(group=GROUP)}


def plugin_source(point: EntryPoint) -> MethodSource:
    """Identify the code of a plug-in: its package's version, and the digest of its code as it is now."""
    package, version = (point.dist.name, point.dist.version) if point.dist else (point.module, "0")
    return MethodSource(package=package, version=version, digest=code_digest(point.module))


def code_digest(module: str) -> str:
    """Hash the statements of a method's module, and of what it imports from its own package and `procap.methods`.

    Comments and docstrings do not count. Returns 16 hex digits.
    """
    roots = tuple({f"{GROUP}.", f"{module.partition('.')[0]}."} - {"procap."})
    modules, digest = [module], hashlib.sha256()
    for name in modules:
        spec = _find_module(name)
        if spec and spec.origin and spec.has_location:
            statements, imports = _read_code(Path(spec.origin).read_bytes())
            digest.update(statements)
            package = name if spec.submodule_search_locations else name.rpartition(".")[0]
            for level, path in imports:
                # "..x" in package a.b is a.x.
                above = package.split(".")[: package.count(".") + 2 - level] if level else []
                imported = ".".join([*above, path]).strip(".")
                if imported not in modules and f"{imported}.".startswith(roots) and imported != GROUP:
                    modules.append(imported)
    return digest.hexdigest()[:16]


def _find_module(name: str) -> ModuleSpec | None:
    """Find a module without importing its package; None for any other thing that a package or module has."""
    package = name.rpartition(".")[0]
    if not package:
        return importlib.util.find_spec(name)
    above = _find_module(package)
    folders = above.submodule_search_locations if above else None
    return PathFinder.find_spec(name, folders) if folders else None


@functools.cache
def _read_code(content: bytes) -> tuple[bytes, list[tuple[int, str]]]:
    """Return the statements of a source file as text, and level and name of what it may import."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return content, []
    imports: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".strip(".") for alias in node.names)]
            imports += [(node.level, name) for name in names]
    return json.dumps(_plain(tree)).encode(), imports


def _plain(node: Any) -> Any:
    # Not `ast.dump`, whose text depends on the version of Python.
    if isinstance(node, ast.AST):
        fields = {name: _plain(value) for name, value in ast.iter_fields(node) if value is not None and value != []}
        return {"": type(node).__name__, **fields}
    if isinstance(node, list):
        is_text = [isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in node]
        return [_plain(part) for part, skipped in zip(node, is_text, strict=True) if not skipped]
    return repr(node)


def describe_unexpected(error: BaseException) -> str:
    """Describe an error that is no user's: the plug-in, file and line that raised it, else an internal error."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    # Triton and Inductor run a C compiler, whose installation may be incomplete.
    if isinstance(error, subprocess.CalledProcessError) or type(error).__module__.startswith(COMPILERS):
        return f"a kernel cannot be compiled: {text}: repeat with --accelerate off"
    return f"{frame}: {text}" if (frame := find_place(error)) else f"internal error: {text}"


def find_place(error: BaseException) -> str:
    """Find the innermost frame of `error` in the module or package of a plug-in; empty if there is none."""
    plugins = [(point, root) for point in find_plugins().values() if (root := _source_root(point))]
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        file, code = Path(frame.f_code.co_filename), frame.f_code
        inside = [point for point, root in plugins if root in (file, *file.parents)]
        # If a module has several plug-ins, choose the one whose class has the function.
        inside.sort(key=lambda point: point.attr != code.co_qualname.partition(".")[0])
        if inside:
            return f"method '{inside[0].name}' (plug-in) fails in {file}, line {line}, {code.co_name}"
    return ""


def _source_root(point: EntryPoint) -> Path | None:
    """Return the folder of a plug-in's package, or the file of its module, without importing it."""
    try:
        spec = importlib.util.find_spec(point.module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec and spec.origin else None
