"""A pipe among the files of a data set is refused by name and never opened: opening one waits for a writer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from clip_benchmark_shards import layout
from toy_shards import toy_source

from benchmarks.cli import main
from shards.errors import DataError
from shards.fewshot import draw_samples, load_samples, store_samples
from shards.pack import pack_source
from shards.reader import open_dataset
from shards.records import png


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("a pipe was opened")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def replace_by_pipe(file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize("name", ["manifest.json", "classnames.txt", "test/index.npy", "test/paths.txt", "test/0.tar"])
def test_in_a_packed_data_set(name, tmp_path, capsys):
    pack_source(toy_source(), tmp_path, per_shard=20)
    replace_by_pipe(tmp_path / "toy" / name)
    assert main(["data", "check", "toy", "--data", str(tmp_path), "--workers", "1"]) in (1, 2)
    # Without a manifest the folder is no data set.
    named = "unknown data set 'toy'" if name == "manifest.json" else str(tmp_path / "toy" / name)
    assert named in "".join(capsys.readouterr())
    for stream in (False, True):
        if name != "classnames.txt":
            with pytest.raises(DataError, match=name):
                split = open_dataset(tmp_path, "toy", stream=stream).split("test")
                assert split.paths


def test_among_stored_few_shot_samples(tmp_path):
    pack_source(toy_source(), tmp_path)
    samples = draw_samples(open_dataset(tmp_path, "toy"), shots=1, seed=1)
    replace_by_pipe(tmp_path / "toy" / "few-shot" / f"{samples.digest}.json")
    with pytest.raises(DataError, match=samples.digest):
        store_samples(tmp_path / "toy", samples)
    with pytest.raises(DataError, match=samples.digest):
        load_samples(tmp_path / "toy", samples.digest)


def put_class_folders(folder: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(6):
            file = folder / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(np.full((4, 4, 3), number, np.uint8)))


@pytest.mark.parametrize("name", ["birds/cat/7.png", "birds/cat/notes", "birds.yaml"])
@pytest.mark.parametrize("command", ["check", "pack"])
def test_among_class_folders_of_a_user(name, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    put_class_folders(tmp_path / "birds")
    replace_by_pipe(tmp_path / name)
    assert main(["data", command, "./birds", *(["--data", "packed"] if command == "pack" else [])]) in (1, 2)
    assert name.rpartition("/")[2] in "".join(capsys.readouterr())


def test_in_place_of_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "birds.yaml").write_text("name: birds\ntemplate: a {}.\ntable: labels.csv\n", encoding="utf-8")
    replace_by_pipe(tmp_path / "labels.csv")
    assert main(["data", "check", "birds.yaml"]) == 1
    assert "labels.csv" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["classnames.txt", "test/nshards.txt", "test/0.tar"])
def test_among_shards_of_others(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layout(tmp_path / "tars", {"test": (4,)})
    (tmp_path / "mine.yaml").write_text("name: mine\ntemplate: a {}.\nshards: tars\n", encoding="utf-8")
    replace_by_pipe(tmp_path / "tars" / name)
    assert main(["data", "check", "mine.yaml"]) == 1
    assert name in "".join(capsys.readouterr())
