"""The editable installation that `make` makes."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("procap", "shards", "runner", "cluster", "benchmarks")


def test_folders_with_the_names_of_packages_do_not_replace_them(tmp_path):
    make = ["make", "-n", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    commands = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    modes = re.findall(r"--config-settings? (editable_mode=\S+) --editable", commands)
    assert len(modes) == 2, "uv, and pip in its place"
    source, site, wheels = tmp_path / "source", tmp_path / "site", tmp_path / "wheels"
    for name in (*PACKAGES, "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = dict([modes[0].split("=")])
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r}, {settings})"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=source, env=environment, capture_output=True, check=True)
    [wheel] = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(site)
    for name in PACKAGES:
        (tmp_path / "work" / name).mkdir(parents=True)
    # Without `-S` the packages of this interpreter would be found.
    code = f"import site; site.addsitedir({str(site)!r})\nfor name in {PACKAGES}: print(__import__(name).__file__)"
    command = [sys.executable, "-S", "-c", code]
    found = subprocess.run(command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True)
    assert found.stdout.splitlines() == [str(source / name / "__init__.py") for name in PACKAGES], found.stderr


def test_a_wheel_has_every_file_that_the_packages_read(tmp_path):
    source = tmp_path / "source"
    for name in (*PACKAGES, "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    files = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.*")}
    # The files of `cluster` are templates, which users copy from the repository.
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert not {file for file in files - packed if "__pycache__" not in file and not file.startswith("cluster/")}
