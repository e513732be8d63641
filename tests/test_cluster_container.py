"""The file that the image is built from: understood, small in what it takes, and enough for the package."""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from procap import __version__
from runner.environment import LIBRARY_DEFAULTS

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "cluster" / "container" / "Dockerfile"


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if binary is None:
        pytest.skip("hadolint is not installed")
    return subprocess.run([binary, "--no-color", str(path)], capture_output=True, text=True, timeout=300)


def test_the_container_file_is_understood_and_a_broken_one_is_refused(tmp_path):
    ended = hadolint(DOCKERFILE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    broken = tmp_path / "Dockerfile"
    for old, new in (("\nRUN ", "\nRUNS "), (":3.11.14-slim-bookworm", ":latest"), ("WORKDIR /opt", "WORKDIR opt")):
        assert old in DOCKERFILE.read_text()
        broken.write_text(DOCKERFILE.read_text().replace(old, new, 1))
        assert hadolint(broken).returncode == 1, new


def copied() -> list[str]:
    """What the container file takes from the project."""
    lines = [line.split()[1:] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")]
    return [source for *sources, _ in lines for source in sources]


def reaches_the_builder(name: str) -> bool:
    """Whether Dockerfile.dockerignore lets a path pass: the last pattern that matches it decides."""
    passes = True
    for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parts = [name, *(str(parent) for parent in Path(name).parents)]
        if line and not line.startswith("#") and any(fnmatch.fnmatch(part, pattern) for part in parts):
            passes = line.startswith("!")
    return passes


def test_only_what_the_image_needs_reaches_its_builder():
    sources = copied()
    assert all((ROOT / source).exists() and reaches_the_builder(source) for source in sources)
    for private in (
        "results/x.json",
        ".venv/bin/python",
        ".git/config",
        ".ray-token-7",
        "demo/mlflow.db",
        "id_ed25519",
    ):
        assert not reaches_the_builder(private) and private.split("/")[0] not in sources


def test_what_the_image_copies_is_enough_to_build_the_package(tmp_path):
    for source in copied():
        here, there = ROOT / source, tmp_path / "context" / source
        if here.is_dir():
            shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            there.parent.mkdir(exist_ok=True)
            shutil.copy(here, there)
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    line += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "context")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    held = set(zipfile.ZipFile(tmp_path / f"procap_bench-{__version__}-py3-none-any.whl").namelist())
    sources = {
        str(file.relative_to(ROOT))
        for package in ("procap", "shards", "runner", "cluster", "benchmarks")
        for file in (ROOT / package).rglob("*")
        if file.suffix in (".py", ".safetensors", ".csv", ".json", ".txt", ".html") and "studies" not in file.parts
    }
    assert sources <= held, sorted(sources - held)
    assert not any(name.startswith("benchmarks/studies/") for name in held)


def test_the_image_keeps_libraries_as_quiet_as_the_program_does():
    """Ray's own processes start before the program can say anything."""
    text = DOCKERFILE.read_text()
    for name in ("RAY_USAGE_STATS_ENABLED", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "HF_HUB_OFFLINE"):
        assert f"{name}={LIBRARY_DEFAULTS[name]}" in text
