"""Packing over processes: the same bytes for any number of them, and a packing that is stopped goes on."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from child_process import start_process
from command_line import read_files
from toy_shards import COUNTS, SAME_PATH, BrokenPart, LoggedPart, toy_source

from procap.errors import UserError
from shards.check_dataset import check_dataset
from shards.pack import pack_source
from shards.reader import open_dataset

SHARDS = 5 + 5 + 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """What an uninterrupted packing by one process writes."""
    root = tmp_path_factory.mktemp("whole")
    pack_source(toy_source(), root, per_shard=5)
    return read_files(root)


def packed_again(log: Path) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def logged(tmp_path: Path) -> dict[str, object]:
    return {"part": partial(LoggedPart, tmp_path / "log", COUNTS["train"])}


def packing(root, log, workers, held):
    """Another process packs; it finishes the shards before image `held` of train and no more."""
    code = (
        "import signal, sys; from functools import partial; from pathlib import Path; from toy_shards import *\n"
        # What a shell started in the background ignores it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"part = partial(LoggedPart, Path({str(log)!r}), {held})\n"
        f"pack_source(toy_source(part=part), Path({str(root)!r}), per_shard=5, workers={workers})"
    )
    return start_process([sys.executable, "-c", code], env=SAME_PATH, stderr=subprocess.PIPE)


def finished(root: Path) -> set[str]:
    return {f"{file.parent.name} {int(file.stem) * 5}" for file in root.glob(".toy.partial/finished/*/*.json")}


def wait_for(condition) -> None:
    end = time.monotonic() + 900
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_any_number_of_workers_writes_the_same_bytes_and_reports_progress(tmp_path, whole):
    reported: list[tuple[str, int, int]] = []
    pack_source(toy_source(), tmp_path, per_shard=5, workers=3, on_progress=lambda *step: reported.append(step))
    assert read_files(tmp_path) == whole
    for split, count in COUNTS.items():
        steps = [done for name, done, total in reported if name == split and total == count]
        assert steps == sorted(steps) and steps[-1] == count
    reported.clear()
    assert check_dataset(tmp_path, "toy", on_progress=lambda *step: reported.append(step)).ok
    assert {name: done for name, done, _ in reported} == COUNTS


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_packing_looks_unfinished_leaves_no_process_and_goes_on(tmp_path, whole, workers):
    root, log = tmp_path / "data", tmp_path / "log"
    with packing(root, log, workers, held=15) as process:
        wait_for(lambda: len(finished(root)) == 3)
        crew = children(process.pid)
        assert len(crew) == (0 if workers == 1 else 3), "workers and the tracker of what they share"
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_running, crew)))

    with pytest.raises(UserError, match="no shards of 'toy'"):
        open_dataset(root, "toy")
    assert not list(root.glob("*/manifest.json"))
    kept = finished(root)
    assert len(kept) == 3
    packed_again(log)
    pack_source(toy_source(**logged(tmp_path)), root, per_shard=5)
    again = packed_again(log)
    assert not kept & set(again) and len(again) == SHARDS - len(kept), "nothing finished is packed again"
    assert read_files(root) == whole, "and nothing else lies about"


def test_a_killed_worker_is_one_line_and_the_rest_is_kept(tmp_path, whole):
    root, log = tmp_path / "data", tmp_path / "log"
    with packing(root, log, 2, held=15) as process:
        wait_for(lambda: finished(root))
        workers = [pid for pid in children(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(workers[0], signal.SIGKILL)
        message = process.communicate(timeout=900)[1].decode().splitlines()[-1]
    assert "a worker process was killed" in message and "start again" in message
    kept = finished(root)
    packed_again(log)
    pack_source(toy_source(**logged(tmp_path)), root, per_shard=5)
    assert not kept & set(packed_again(log)) and read_files(root) == whole


def test_an_interrupt_ends_all_workers_quickly_and_quietly(tmp_path):
    with packing(tmp_path / "data", tmp_path / "log", 2, held=0) as process:
        wait_for(lambda: (tmp_path / "log").exists())
        crew = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        # Long before the part that they are at would be packed.
        errors = process.communicate(timeout=900)[1].decode()
        assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt"), errors
        wait_for(lambda: not any(map(is_running, crew)))
    assert not (tmp_path / "data/toy").exists()


def stopped(tmp_path: Path) -> Path:
    """A packing of which everything but the second half of val and all of test is finished."""
    with pytest.raises(UserError):
        pack_source(toy_source(part=BrokenPart), tmp_path / "data", per_shard=5)
    return tmp_path / "data"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_image_is_named_alike_by_any_workers_and_repaired_the_rest_is_packed(tmp_path, whole, workers):
    root = tmp_path / "data"
    with pytest.raises(UserError) as error:
        pack_source(toy_source(part=BrokenPart), root, per_shard=5, workers=workers)
    assert str(error.value).startswith("'toy' val: val/") and "12.png is not a readable image" in str(error.value)
    kept = finished(root)
    assert kept and "val 10" not in kept
    pack_source(toy_source(**logged(tmp_path)), root, per_shard=5)
    again = packed_again(tmp_path / "log")
    assert sorted(again) == sorted(set(again)) and len(again) == SHARDS - len(kept)
    assert read_files(root) == whole


def test_a_finished_shard_that_changed_is_packed_again(tmp_path, whole):
    root = stopped(tmp_path)
    tars = root / ".toy.partial/set/train"
    data = bytearray((tars / "1.tar").read_bytes())
    data[600] ^= 1
    (tars / "1.tar").write_bytes(data)
    os.truncate(tars / "2.tar", 1000)
    (tars / "3.tar").unlink()
    (root / ".toy.partial/finished/train/4.json").write_text("{")
    (tars / ".0.tar.77-1.tmp").write_text("half a shard")
    pack_source(toy_source(**logged(tmp_path)), root, per_shard=5)
    again = packed_again(tmp_path / "log")
    assert [line for line in again if "train" in line] == ["train 5", "train 10", "train 15", "train 20"]
    assert read_files(root) == whole


def test_a_finished_shard_whose_raw_files_changed_is_packed_again(tmp_path, whole):
    root = stopped(tmp_path)
    (tmp_path / "train-5.stamp").write_text("newer")
    pack_source(toy_source(**logged(tmp_path)), root, per_shard=5)
    assert [line for line in packed_again(tmp_path / "log") if "train" in line] == ["train 5"]
    assert read_files(root) == whole


@pytest.mark.parametrize(("changes", "options"), [
    ({"origin": "toy 2"}, {}),
    ({"classnames": ("a", "b", "c", "d", "e")}, {}),
    ({"resize": 100}, {}),
    ({"counts": {**COUNTS, "train": 22}}, {}),
    ({}, {"per_shard": 6}),
    ({}, {"force": True}),
])  # fmt: skip
def test_another_plan_starts_over(tmp_path, changes, options):
    root = stopped(tmp_path)
    manifest = pack_source(toy_source(**logged(tmp_path), **changes), root, **({"per_shard": 5} | options))
    assert len(packed_again(tmp_path / "log")) == sum(len(split.shards) for split in manifest.splits.values())
    assert [entry.name for entry in root.iterdir()] == ["toy"] and check_dataset(root, "toy").ok
    shards = {shard.file for split in manifest.splits.values() for shard in split.shards}
    assert {str(tar.relative_to(root / "toy")) for tar in root.rglob("*.tar")} == shards


def test_a_stopped_packing_leaves_an_older_set_in_its_place(tmp_path):
    root = tmp_path / "data"
    older = pack_source(toy_source(origin="older"), root)
    stopped(tmp_path)
    assert open_dataset(root, "toy").manifest == older and check_dataset(root, "toy").ok
    assert pack_source(toy_source(), root, per_shard=5).source == "toy"
    assert [entry.name for entry in root.iterdir()] == ["toy"]
