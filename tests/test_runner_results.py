"""Result files: all or nothing, readable again, refused when broken, and one writer per run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from procap.errors import UserError
from procap.recipe import Recipe
from runner.config import RunConfig, Target
from runner.environment import library_defaults, resolve_device, source_state
from runner.results import EpochLog, Progress, read_document, write_bytes, write_json
from runner.run_folders import RunFolder, find_runs

CONFIG = RunConfig(method="coop", recipe=Recipe(lr=0.1, epochs=1, batch_size=1), dataset="digits")
PROGRESS = Progress(
    config_hash=CONFIG.hash,
    step=3,
    steps=9,
    epochs=[EpochLog(epoch=0, lr=1e-5, terms={"ce": 0.1}, seconds=0.3, images_per_second=None)],
    seconds=0.3,
    environment={"gpu": None},
)


def test_a_document_comes_back_as_it_was_written(tmp_path):
    write_json(tmp_path / "deep" / "progress.json", PROGRESS)
    assert read_document(tmp_path / "deep" / "progress.json", Progress) == PROGRESS
    assert json.loads((tmp_path / "deep" / "progress.json").read_text())["schema"] == 1
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["progress.json"]


def test_a_full_disk_keeps_the_old_file_and_is_said_in_one_line(tmp_path):
    file = tmp_path / "train.json"
    write_bytes(file, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*train\.json"):
            write_bytes(file, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_bytes() == b"old"
    assert [left.name for left in tmp_path.iterdir()] == ["train.json"]


def test_a_results_folder_that_cannot_be_is_said_in_one_line(tmp_path):
    (tmp_path / "results").write_text("a file")
    with pytest.raises(UserError, match="--results"), RunFolder(tmp_path / "results" / "run").locked():
        pass
    with pytest.raises(UserError, match="--results"):
        write_json(tmp_path / "results" / "run" / "config.json", CONFIG)


def test_a_run_has_one_writer_and_a_dead_one_does_not_count(tmp_path):
    folder = RunFolder(tmp_path / "run")
    code = (
        "import sys, pathlib; from runner.run_folders import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked(): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"held by another process .pid {other.pid}"), folder.locked():
            pass
        other.kill()
    with folder.locked():
        pass


def test_half_written_files_of_a_killed_writer_are_swept(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.state.mkdir(parents=True)
    for leftover in (folder.path / ".train.json.1-2.tmp", folder.state / ".step-00000001-00.safetensors.1-2.tmp"):
        leftover.write_bytes(b"half")
    with folder.locked():
        pass
    assert sorted(path.name for path in folder.path.rglob("*")) == [".lock", "state"]


def test_progress_of_an_unfinished_run_or_of_one_that_is_held_is_never_cleared_away(tmp_path):
    folder = RunFolder(tmp_path / CONFIG.path)
    write_json(folder.progress_file, PROGRESS)
    folder.tidy()
    assert folder.progress() == PROGRESS
    write_bytes(folder.train_file, b"{}")
    with folder.locked():
        folder.tidy()
    assert folder.progress() == PROGRESS
    folder.tidy()
    assert folder.progress() is None


def test_runs_are_found_and_cleared(tmp_path):
    folder = RunFolder(tmp_path / CONFIG.path)
    write_json(folder.config_file, CONFIG)
    write_json(folder.progress_file, PROGRESS)
    write_bytes(folder.eval_file(Target("digits")), b"{}")
    write_json(tmp_path / "mlartifacts" / "1" / "0a1b" / "artifacts" / "config.json", CONFIG)
    assert find_runs(tmp_path) == [folder]
    assert folder.config() == CONFIG
    folder.clear()
    assert find_runs(tmp_path) == []
    assert not folder.eval_files()
    assert find_runs(tmp_path / "nowhere") == []


def test_the_commit_is_that_of_the_source_tree_and_dirt_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    assert source_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    assert source_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("two")
    assert source_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "mps"])
def test_a_device_that_is_not_here_is_refused_with_what_would_work(name):
    with pytest.raises(UserError, match=r"cpu") as caught:
        resolve_device(name)
    assert caught.value.exit_code == 2


def test_libraries_are_kept_offline_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    library_defaults()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_disk_without_locks_blocks_no_run(tmp_path, monkeypatch):
    """As some network disks are; a run there is kept apart by whoever hands it out."""
    import errno
    import fcntl

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunFolder(tmp_path / "run").locked():
        pass
