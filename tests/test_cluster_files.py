"""The files of a cluster and of its image, read by the programs that they are for."""

import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks.cli.app import program
from procap import __version__

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
AUTOSCALER = sorted((CLUSTER / "autoscaler").glob("*.yaml"))
KUBERAY = [CLUSTER / "kuberay" / "raycluster.yaml", CLUSTER / "kuberay" / "rayjob.yaml"]
SCRIPTS = sorted((CLUSTER / "slurm").glob("*.sbatch"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def cluster_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["rayClusterSpec"] if document["kind"] == "RayJob" else document["spec"]


@pytest.mark.parametrize("path", AUTOSCALER, ids=lambda path: path.name)
def test_ray_accepts_the_autoscaler_files_which_keep_the_dashboard_private(path):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read(path)
    validate_config(prepare_config(copy.deepcopy(config)))
    heads = [line for line in config["head_start_ray_commands"] if "--head" in line]
    assert heads and all("--dashboard-host=127.0.0.1" in line for line in heads)
    assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["docker"]["image"] == f"procap-bench:{__version__}"


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.name)
def test_kuberay_accepts_the_clusters_with_ray_and_the_image_of_this_version(path):
    from jsonschema import validate

    document = read(path)
    validate(document, json.loads((ROOT / "tests" / "schemas" / "kuberay.json").read_text()))
    cluster = cluster_of(document)
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and cluster["rayVersion"] == pinned[1] and cluster["authOptions"]["mode"] == "token"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            assert container["image"] == f"procap-bench:{__version__}"
            # Keys come from Kubernetes' secrets.
            assert "env" not in container and [next(iter(source)) for source in container["envFrom"]] == ["secretRef"]
    assert cluster == cluster_of(read(KUBERAY[0])), "the cluster of a job is the standing cluster"


def parse(words: list[str]) -> Any:
    """The parsed options of a command line of procap. Raises click's errors for what the program does not know."""
    command: Any = typer.main.get_command(program)
    while hasattr(command, "list_commands"):
        command, words = command.get_command(None, words[0]), words[1:]
    return command.make_context("procap", list(words)).params


@pytest.mark.parametrize("path", [*AUTOSCALER, *KUBERAY, CLUSTER / "slurm" / "ray.sbatch"], ids=lambda path: path.name)
def test_the_command_in_a_file_is_one_of_the_program(path):
    text = re.sub(r"\n# ", " ", path.read_text())
    found = re.findall(r"procap submit -- ([^;(\n]+?)(?: #|[;(\n])", text)
    found += re.findall(r"^ +entrypoint: procap (.+)$", text, re.MULTILINE)
    [line] = found + re.findall(r"ray\.sbatch (bench [^,]+),", text)
    options = parse(shlex.split(line))
    assert options["launcher"] == "ray"
    assert all(str(options[name]).startswith(("/shared/", "s3://")) for name in ("data", "results"))


def test_the_image_builds_the_whole_package(tmp_path):
    lines = [line.split()[1:-1] for line in (CLUSTER / "container/Dockerfile").read_text().splitlines()
             if line.startswith("COPY ")]  # fmt: skip
    for name in (name for names in lines for name in names):
        target = tmp_path / "context" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / name, target) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "context")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    names = set(zipfile.ZipFile(tmp_path / f"procap_bench-{__version__}-py3-none-any.whl").namelist())
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.csv", "*.html", "*.safetensors"], cwd=ROOT,
                             capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
    packages = ("procap/", "shards/", "runner/", "cluster/", "benchmarks/")
    sources = {name for name in tracked if name.startswith(packages)}
    assert not any(name.startswith(("tools/", "examples/", "tests/")) for name in names)
    assert any(name.endswith("share/procap-bench/methods/visual-tokens/visual_tokens.py") for name in names)
    assert {name for name in sources if (ROOT / name).exists()} <= names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_bash_and_print_their_usage(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).stderr == b""
    ended = subprocess.run(["bash", str(path)], capture_output=True, text=True)
    assert ended.returncode == 2 and f"cluster/slurm/{path.name}" in ended.stderr
