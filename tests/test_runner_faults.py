"""Disk full, signals, broken data, a server that goes away: all ranks end with one reason, and a repeat ends right."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from local_server import Answer, LocalServer
from rank_processes import SECONDS, Ended, run_ranks
from sessions import evaluate
from small_runs import make_runtime, only_run

from benchmarks.cli import eval as eval_command
from benchmarks.cli import main
from benchmarks.cli import train as train_command
from runner.checkpoint import TrainState, read_checkpoint
from runner.config import Target
from runner.distributed.ranks import ranks_from_environment
from shards import remote

STEPS, LATER = 15, 6
ROOM = "ballast"


class Trouble:
    """What happens to a rank in the middle of its work, each by name."""

    @staticmethod
    def send(number: int) -> None:
        os.kill(os.getpid(), number)

    @staticmethod
    def fill_disk(results: str) -> None:
        with (Path(results) / ROOM).open("wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(4096)):
                    pass
            except OSError:
                return

    @staticmethod
    def overwrite(shard: str) -> None:
        file = Path(shard)
        with file.open("r+b") as stream:
            stream.write(bytes(file.stat().st_size))


def procap(arguments, every=3600.0, trouble=(), unlucky=1, at=LATER, silent=""):
    """The command as every rank runs it, with a state `every` so many seconds; `trouble` comes after step `at`.

    "{rank}" in an argument is the rank's number. A server is given up after a second where `silent` ends the URL.
    """
    rank = ranks_from_environment().rank
    arguments = [word.replace("{rank}", str(rank)) for word in arguments]
    count, runtime_config, filesystem = TrainState.count, train_command.runtime_config, remote.filesystem

    def counted(state, *what):
        count(state, *what)
        if trouble and rank == unlucky and state.step == at:
            name, *how = trouble
            getattr(Trouble, name)(*how)

    def often(*place, **more):
        return replace(runtime_config(*place, **more), state_seconds=every, timeout=SECONDS)

    def opened(url):
        with patch.object(remote, "SOCKET_SECONDS", 0.5 if silent and url.endswith(silent) else SECONDS):
            return filesystem(url)

    with ExitStack() as stack:
        for where, name, value in (
            (TrainState, "count", counted),
            (train_command, "runtime_config", often),
            (eval_command, "runtime_config", often),
            (remote, "filesystem", opened),
        ):
            stack.enter_context(patch.object(where, name, value))
        code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture(scope="module")
def command(few_digits, short_checkpoint):
    """The words of a training that writes below a folder: MaPLe, SGD, 15 steps of 4 images in 3 epochs."""

    def words(results: Path, data: str = str(few_digits), lr: str = "0.01") -> list[str]:
        flags = {
            "--methods": "maple", "--datasets": "digits", "--shots": "4", "--backbone": str(short_checkpoint),
            "--epochs": "3", "--batch-size": "4", "--lr": lr, "--option": "depth=3", "--data": data,
            "--results": str(results), "--tracking": "off", "--device": "cpu",
        }  # fmt: skip
        return ["train", *(word for flag in flags.items() for word in flag)]

    return words


@pytest.fixture(scope="module")
def straight(command, tmp_path_factory):
    """The run as one process trains it that nothing happens to."""
    results = tmp_path_factory.mktemp("straight")
    assert codes(run_ranks(1, procap, command(results))) == [0]
    return only_run(results)


def codes(ends: list[Ended]) -> list[int]:
    return [end.code for end in ends]


def last_lines(ends: list[Ended]) -> list[str]:
    """The lines that all ranks together print at the end of a run; none may be a traceback.

    A rank that lost the connection to one that failed does not count.
    """
    lines = [line for end in ends for line in end.err.splitlines()]
    assert not [line for line in lines if "Traceback" in line or "internal error" in line], lines
    errors = [line for line in lines if line.startswith("procap: ") and not line.startswith("procap: note")]
    return [*dict.fromkeys(line for line in errors if "lost the connection to another rank" not in line)]


def states(folder):
    return sorted(int(path.name[5:13]) for path in folder.state_folder.iterdir())


def assert_same(wanted, results, data):
    """A finished run is the other one up to the order of sums, and nothing is left over."""
    folder = only_run(results)
    one, other = wanted.read_training(), folder.read_training()
    assert one is not None and other is not None
    assert (other.steps, other.images, other.fewshot) == (STEPS, one.images, one.fewshot)
    for mine, theirs in zip(other.epochs, one.epochs, strict=True):
        assert mine.lr == theirs.lr and mine.terms == pytest.approx(theirs.terms, rel=2e-5)
    weights = read_checkpoint(folder.checkpoint_file, other.checkpoint_sha256)[0]
    for name, weight in read_checkpoint(wanted.checkpoint_file)[0].items():
        assert (weight - weights[name]).abs().max() <= 1e-4 * weight.abs().max(), name
    counts = []
    for run in (wanted, folder):
        config = run.read_config()
        place = make_runtime(data, run.path.parents[5])
        counts.append([evaluate(config, Target("digits", half), place).per_class for half in ("base", "novel")])
    assert counts[0] == counts[1]
    left = {path.name for path in folder.path.rglob("*") if path.is_file()}
    targets = {f"digits-{half}-test.json" for half in ("base", "novel")}
    assert left == {".lock", "config.json", "train.json", "checkpoint.safetensors", *targets}


SIGNALS = [pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow), (signal.SIGINT, 4)]


@pytest.mark.parametrize(("number", "later"), SIGNALS)
def test_a_signal_to_one_rank_saves_one_state_for_any_number(command, straight, few_digits, tmp_path, number, later):
    ends = run_ranks(2, procap, command(tmp_path), 3600.0, ("send", number))
    assert codes(ends) == [128 + number] * 2
    folder = only_run(tmp_path)
    progress = folder.read_progress()
    assert progress is not None and progress.status == "interrupted"
    assert LATER <= progress.step <= LATER + 2 and states(folder) == [progress.step]
    (line,) = last_lines(ends)
    assert line.startswith(f"procap: {number.name}: stopped") and f"at step {progress.step} of {STEPS}" in line
    assert codes(run_ranks(later, procap, command(tmp_path))) == [0] * later
    assert_same(straight, tmp_path, few_digits)


def test_a_killed_rank_ends_the_others_and_a_state_cut_short_costs_some_steps(command, straight, few_digits, tmp_path):
    ends = run_ranks(2, procap, command(tmp_path), 0.0, ("send", signal.SIGKILL))
    assert codes(ends) == [1, -signal.SIGKILL]
    assert "procap: error: rank 0 of 2 lost the connection to another rank" in ends[0].err
    folder = only_run(tmp_path)
    older, _ = states(folder)
    newest = max(folder.state_folder.iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    ends = run_ranks(2, procap, command(tmp_path))
    assert codes(ends) == [0, 0]
    assert [end.err.count(f"{newest} cannot be used") for end in ends] == [1, 0]
    assert f"from step {older} of {STEPS}" in ends[0].err
    assert_same(straight, tmp_path, few_digits)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "procap", str(folder)], capture_output=True)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("file systems may not be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_all_with_one_line_and_with_room_the_run_goes_on(command, straight, few_digits, small_disk):
    ends = run_ranks(2, procap, command(small_disk), 0.0, ("fill_disk", str(small_disk)), 0)
    assert codes(ends) == [1, 1]
    (line,) = last_lines(ends)
    folder = only_run(small_disk)
    assert line.startswith(f"procap: error: cannot write {folder.path}") and "No space left on device" in line
    kept = states(folder)
    assert kept and kept[-1] <= LATER
    full = run_ranks(2, procap, command(small_disk), 0.0)
    assert codes(full) == [1, 1] and len(last_lines(full)) == 1 and "No space left on device" in last_lines(full)[0]
    assert states(folder) == kept
    (small_disk / ROOM).unlink()
    ends = run_ranks(2, procap, command(small_disk))
    assert codes(ends) == [0, 0] and f"from step {kept[-1]} of {STEPS}" in ends[0].err
    assert_same(straight, small_disk, few_digits)


def test_a_loss_that_is_not_finite_is_reported_once_and_ends_all(command, tmp_path):
    ends = run_ranks(2, procap, command(tmp_path, lr="1e30"), 0.0)
    assert codes(ends) == [1, 1]
    (line,) = last_lines(ends)
    assert "is not finite" in line and line.endswith("fails again: train another run with a lower lr")
    folder = only_run(tmp_path)
    progress = folder.read_progress()
    assert progress is not None and progress.status == "failed" and folder.read_training() is None


@pytest.fixture
def own_data(few_digits, tmp_path) -> Path:
    """A copy of the data for each of two ranks, in 0 and 1."""
    for rank in "01":
        shutil.copytree(few_digits, tmp_path / "data" / rank)
    return tmp_path / "data"


def test_a_shard_that_one_rank_lacks_ends_all_with_its_name(command, own_data, tmp_path):
    shard = own_data / "1" / "digits" / "train" / "0.tar"
    shard.unlink()
    ends = run_ranks(2, procap, command(tmp_path, f"{own_data}/{{rank}}"))
    assert codes(ends) == [1, 1]
    (line,) = last_lines(ends)
    assert "'digits' train: " in line and f"{shard} cannot be read (No such file or directory" in line


SHARD = "/digits/train/0.tar"


@pytest.mark.parametrize(
    ("answer", "silent", "words"),
    [(Answer(wait=SECONDS), SHARD, "Timeout"), (Answer(cut=1000), "", "cannot be reached")],
)
def test_a_server_that_stays_silent_ends_all_with_one_line(command, few_digits, tmp_path, answer, silent, words):
    with LocalServer(few_digits) as server:
        server.always[SHARD] = answer
        arguments = command(tmp_path, server.url), 3600.0, (), 1, LATER, silent
        ends = run_ranks(2, procap, *arguments, environ={"PROCAP_HOME": str(tmp_path / "cache")})
    assert codes(ends) == [1, 1]
    (line,) = last_lines(ends)
    assert f"{server.url}{SHARD}" in line and words in line
