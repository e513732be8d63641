"""Packing over processes: the same bytes for any number of them, and nothing is left of a packing that is stopped."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from child_process import start_process
from command_line import read_files
from toy_shards import COUNTS, SAME_PATH, broken, is_whole, toy_source

from procap.errors import UserError
from shards.pack import pack_source
from shards.reader import open_dataset


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    """What an uninterrupted packing by one process writes."""
    root = tmp_path_factory.mktemp("whole")
    pack_source(toy_source(per_shard=5), root)
    return read_files(root)


@contextmanager
def packing(root: Path, log: Path, workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process whose packing cannot get past image 15 of train."""
    code = (
        "from functools import partial; from pathlib import Path; from toy_shards import *\n"
        f"part = partial(partial, held, Path({str(log)!r}), 15)\n"
        f"pack_source(toy_source(make_reader=part, per_shard=5), Path({str(root)!r}), workers={workers})"
    )
    with start_process([sys.executable, "-c", code], env=SAME_PATH, stderr=subprocess.PIPE) as process:
        while not (log.exists() and "train 15" in log.read_text()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process


def test_any_number_of_workers_writes_the_same_bytes_and_reports_progress(tmp_path, whole):
    reported: list[tuple[str, int, int]] = []
    pack_source(toy_source(per_shard=5), tmp_path, workers=2, on_progress=lambda *step: reported.append(step))
    assert read_files(tmp_path) == whole
    for split, count in COUNTS.items():
        steps = [done for name, done, total in reported if name == split and total == count]
        assert steps == sorted(steps) and steps[-1] == count
    reported.clear()
    assert is_whole(tmp_path, "toy", on_progress=lambda *step: reported.append(step))
    assert {name: done for name, done, _ in reported} == COUNTS


def test_a_killed_packing_looks_unfinished_and_the_next_packs_the_set_again(tmp_path, whole):
    root = tmp_path / "data"
    with packing(root, tmp_path / "log", workers=1) as process:
        process.kill()
    with pytest.raises(UserError, match="no shards of 'toy'"):
        open_dataset(root, "toy")
    pack_source(toy_source(per_shard=5), root)
    assert read_files(root) == whole, "and no other file is left"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_broken_image_is_named_alike_by_any_workers_and_an_older_set_stays(tmp_path, workers):
    older = pack_source(toy_source(origin="older"), tmp_path)
    with pytest.raises(UserError) as error:
        pack_source(toy_source(make_reader=partial(partial, broken), per_shard=5), tmp_path, workers=workers)
    assert str(error.value).startswith("'toy' val: val/") and "12.png is not a readable image" in str(error.value)
    assert open_dataset(tmp_path, "toy").manifest == older and is_whole(tmp_path, "toy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy"]
