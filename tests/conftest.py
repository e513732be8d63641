"""Shared fixtures: CLIPs small enough for a laptop, with a vision width that differs from the text width.

Heads are 64 wide as in real CLIPs, so that a checkpoint of `tiny_clip` can be read back from its shapes alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from emulated_graphs import emulated_graphs  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from procap.clip import CLIP

# The same examples every time, without deadlines, which a loaded machine would miss.
hypothesis.settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without cached bytecode each of the many processes that tests start would compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before any library with threads is imported, in this process and in those that it starts.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Ray reads it once in a process, and a test process may connect to several clusters.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray starts its workers with low priority (nice 15): beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
# Each test computes its features: those that store them say so.
os.environ["PROCAP_FEATURES_GB"] = "0"
# Tests must not export to the MLflow store of the user who runs them.
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
    os.environ.pop(name, None)


LONG = (
    "test_cluster_ray", "test_runner_deepspeed", "test_runner_launch", "test_runner_ranks",
    "test_runner_faults", "test_shards_loader", "test_benchmarks_suites", "test_runner_track",
)  # fmt: skip
"""Files that take longest: because they wait for Ray, DeepSpeed or ranks, or for much that each test does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that no worker ends with one alone."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory):
    """Read and write no cache of the user who runs the tests: what is packed there would change what is shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCAP_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread, as bit-for-bit comparisons must not depend on the number of cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_geometry():
    from tiny_geometry import GEOMETRY

    return GEOMETRY


@pytest.fixture(scope="session")
def tiny_clip(tiny_geometry):
    """A random CLIP: 12 layers a tower, widths 128 and 64, 32-pixel images of 4 patches."""
    from procap.clip import CLIP

    return CLIP.random(tiny_geometry, seed=0, name="tiny")


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_clip, tmp_path_factory) -> Path:
    """`tiny_clip` as a safetensors file with its configuration: `load_clip(str(path))` gives it back."""
    return save_clip(tiny_clip, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def short_clip():
    """A CLIP like `tiny_clip` with 3 layers a tower, which trains in a third of the time."""
    from tiny_geometry import SHORT_GEOMETRY

    from procap.clip import CLIP

    return CLIP.random(SHORT_GEOMETRY, seed=0, name="tiny")


@pytest.fixture(scope="session")
def short_checkpoint(short_clip, tmp_path_factory) -> Path:
    """`short_clip` as a file, like `tiny_checkpoint`."""
    return save_clip(short_clip, tmp_path_factory.mktemp("weights"))


def save_clip(clip: CLIP, folder: Path) -> Path:
    from safetensors.torch import save_file
    from tiny_geometry import open_clip_config

    path = folder / "tiny.safetensors"
    save_file(clip.state_dict(), path, metadata={"config": json.dumps(open_clip_config(clip.geometry))})
    return path


@pytest.fixture(scope="session")
def tiny_space():
    """Five class names of different token lengths."""
    from procap.text import LabelSpace

    return LabelSpace(
        classnames=("cat", "annual_crop_land", "red circle", "centrifuge tube", "a"),
        template="a photo of a {}.",
        templates=("a photo of a {}",),
    )


@pytest.fixture(scope="session")
def object_store(tmp_path_factory):
    """An S3 server with one bucket."""
    from object_server import object_server

    with object_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3(object_store, monkeypatch):
    """The object store, with the environment that gives access to it."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return object_store


def made_once(tmp_path_factory, name, make):
    """Return a folder that `make` fills for the first test worker that needs it, and that all of them share."""
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = tmp_path_factory.mktemp(name)
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory) -> Path:
    """Pack some of the digit scans into a data folder, which tests must not change."""

    def pack(folder: Path) -> None:
        from shards.builtin_sources import builtin_source
        from shards.catalogue import find
        from shards.pack import pack_source

        source, counts = builtin_source(find("digits")), {"train": 120, "val": 40, "test": 60}
        pack_source(replace(source, counts=counts), folder)

    return made_once(tmp_path_factory, "few-digits", pack)


@pytest.fixture(scope="module")
def where(few_digits, tiny_checkpoint) -> list[str]:
    """The flags of a sweep with a small CLIP on the digits, one run at a time."""
    return ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--max-concurrent", "1", "--tracking", "off"]


@pytest.fixture(scope="module")
def local_ray():
    """A Ray of this machine with three CPUs, to which this process is connected; returns its address."""
    from cluster.ray_cluster import LOCAL, ray_connection

    with ray_connection(LOCAL, cpus=3):
        import ray

        yield ray.get_runtime_context().gcs_address


@pytest.fixture
def blank_figures(monkeypatch):
    """Draw figures, but render none for a report, which takes longer than all else in it."""
    monkeypatch.setattr("benchmarks.report.page.image_of", lambda figure, form: b"<svg></svg>")


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """Change to an empty folder, and clear settings of the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("PROCAP_DATA", "PROCAP_RAW", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory) -> Path:
    """A SQLite store of MLflow with all its tables, whose creation takes seconds; a copy for each test worker."""

    def create(folder: Path) -> None:
        from runner.tracking.store import TrackingStore

        assert TrackingStore(f"sqlite:///{folder / 'mlflow.db'}", "first", folder).experiment_id

    made = made_once(tmp_path_factory, "mlflow-database", create) / "mlflow.db"
    return Path(shutil.copy(made, tmp_path_factory.mktemp("store")))


@pytest.fixture
def store(mlflow_database, tmp_path, monkeypatch):
    """A new experiment in `mlflow_database` for the results in `tmp_path`."""
    from runner.tracking.store import TrackingStore

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    return TrackingStore.choose(tmp_path, f"sqlite:///{mlflow_database}")
