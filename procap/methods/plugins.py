"""Find methods and suites of other packages, identify their code, and name the place of an error in it.

Nothing here imports a plug-in.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

METHODS_GROUP, SUITES_GROUP = "procap.methods", "procap.suites"


class PlugInSource(BaseModel):
    """The code of a plug-in: runs of equal sources were trained by the same version and the same file of the method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    digest: str = Field(description="first 16 hex digits of the SHA-256 of the method's file")

    def __str__(self) -> str:
        return f"{self.package} {self.version} (source {self.digest})"


def find_plugins(group: str = METHODS_GROUP) -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages in `group` by name."""
    changed = [(path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.exists(path)]
    return _find_plugins(group, tuple(changed))


@functools.cache
def _find_plugins(group: str, path: tuple[tuple[str, int], ...]) -> dict[str, EntryPoint]:
    # Reading the entry points of all packages takes long, and tables need those of each run. Installing a package
    # changes the time of a folder on the path.
    return {point.name: point for point in entry_points(group=group)}


def source_roots(point: EntryPoint) -> list[Path]:
    """List the modules (files) and packages (folders) of the distribution of a plug-in, without importing them."""
    own = point.dist.read_text("top_level.txt") if point.dist else None
    names = {point.module.partition(".")[0], *(own or "").split()}
    roots = []
    for name in sorted(names):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec and spec.submodule_search_locations:
            roots += [Path(folder) for folder in spec.submodule_search_locations]
        elif spec and spec.origin:
            roots.append(Path(spec.origin))
    return roots


def plugin_source(point: EntryPoint) -> PlugInSource:
    """Identify the code of a plug-in: its package's version, and the content of the method's own file as it is now."""
    package, version = (point.dist.name, point.dist.version) if point.dist else (point.module, "0")
    spec = importlib.util.find_spec(point.module)
    content = Path(spec.origin).read_bytes() if spec and spec.origin else b""
    return PlugInSource(package=package, version=version, digest=hashlib.sha256(content).hexdigest()[:16])


def describe_unexpected(error: BaseException) -> str:
    """Describe an error that is no user's: the plug-in, file and line that raised it, else an internal error."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{place}: {text}" if (place := find_place(error)) else f"internal error: {text}"


def find_place(error: BaseException) -> str:
    """Find the innermost frame of `error` in the code of a plug-in, or its member that was called with other arguments.

    Empty if there is none.
    """
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # Python raises the error of a wrong call, as in "Own.plans() missing ...", in the caller: use it if no frame fits.
    called = re.match(r"(\w+)\.(\w+)\(\) ", str(error)) if isinstance(error, TypeError) else None
    for kind, group in (("method", METHODS_GROUP), ("suite", SUITES_GROUP)):
        points = [(point, source_roots(point)) for point in find_plugins(group).values()]
        if called:
            kinds = [getattr(sys.modules.get(point.module), called[1], None) for point, _ in points]
            codes = [getattr(getattr(one, called[2], None), "__code__", None) for one in kinds]
            places = [*((code, code.co_firstlineno) for code in codes if code), *places]
        for code, line in reversed(places):
            file = Path(code.co_filename)
            inside = [point for point, roots in points if any(root in (file, *file.parents) for root in roots)]
            if inside:
                own = [point for point in inside if point.attr == code.co_qualname.partition(".")[0]]
                names = " or ".join(point.name for point in own or inside)
                return f"{kind} '{names}' (plug-in) fails in {file}, line {line}, {code.co_name}"
    return ""
