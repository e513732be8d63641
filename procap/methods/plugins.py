"""Find methods of other packages, identify their code, and name the place of an error in it.

Nothing here imports a plug-in.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

GROUP = "procap.methods"
COMPILERS = ("triton", "torch._inductor", "torch._dynamo")


class PlugInSource(BaseModel):
    """The code of a plug-in: runs of equal sources were trained by the same version and the same file of the method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    version: str
    digest: str = Field(description="first 16 hex digits of the SHA-256 of the method's file")

    def __str__(self) -> str:
        return f"{self.package} {self.version} (source {self.digest})"


def find_plugins() -> dict[str, EntryPoint]:
    """Return the entry points of methods of all installed packages by name."""
    changed = [(path, os.stat(path).st_mtime_ns) for path in sys.path if os.path.exists(path)]
    return _find_plugins(tuple(changed))


@functools.cache
def _find_plugins(path: tuple[tuple[str, int], ...]) -> dict[str, EntryPoint]:
    # Reading the entry points of all packages takes long, and tables need those of each run. Installing a package
    # changes the time of a folder on the path.
    return {point.name: point for point in entry_points(group=GROUP)}


def plugin_source(point: EntryPoint) -> PlugInSource:
    """Identify the code of a plug-in: its package's version, and the content of the method's own file as it is now."""
    package, version = (point.dist.name, point.dist.version) if point.dist else (point.module, "0")
    spec = importlib.util.find_spec(point.module)
    content = Path(spec.origin).read_bytes() if spec and spec.origin else b""
    return PlugInSource(package=package, version=version, digest=hashlib.sha256(content).hexdigest()[:16])


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
