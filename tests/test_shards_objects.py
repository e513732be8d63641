"""Data roots in an object store: as good as a folder, fetched once per machine, and every failure is one line."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from object_server import ObjectServer, object_server
from toy_shards import COUNTS, pixels, toy_source

from shards import mirror, objects, remote
from shards.errors import DataError, DataUsageError, NotThere, Unreachable
from shards.fetch import download
from shards.mirror import has_dataset, mirror_root, refuse_packing
from shards.object_folder import ObjectFolder
from shards.objects import filesystem, version
from shards.pack import pack_source
from shards.reader import open_dataset
from shards.remote import open_body, open_url
from shards.resolve import is_packed


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Holds the toy set below data/."""
    folder = tmp_path_factory.mktemp("s3")
    pack_source(toy_source(), folder / "packed", per_shard=5)
    with object_server(folder) as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        there = ObjectFolder(f"s3://{running.bucket}/data")
        for file in (folder / "packed" / "toy").rglob("*"):
            if file.is_file():
                there.write(file.relative_to(folder / "packed").as_posix(), file.read_bytes())
        yield running


@pytest.fixture
def s3(server, monkeypatch) -> ObjectServer:
    monkeypatch.setattr(remote, "WAITS", ())
    monkeypatch.setattr(mirror, "FRESH", 0.0)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def url(s3) -> str:
    return f"s3://{s3.bucket}/data"


def read_all(root: Path) -> None:
    for name in COUNTS:
        split = open_dataset(root, "toy").split(name)
        assert len(split) == COUNTS[name]
        assert all(np.array_equal(np.asarray(split.image(i)), pixels(name, i)) for i in range(len(split)))


def test_a_data_root_in_an_object_store_reads_like_a_folder(url, tmp_path):
    root = mirror_root(f"{url}/", tmp_path)
    read_all(root)
    assert is_packed(root, "toy") and not is_packed(root, "digits")
    with pytest.raises(DataUsageError, match="can only be read"):
        refuse_packing(root)


def test_processes_of_a_machine_fetch_a_shard_once(s3, url, tmp_path):
    before = s3.asked("GET", ".tar")
    root = mirror_root(url, tmp_path)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=read_all, args=(root,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    shards = len(list(root.rglob("*.tar")))
    assert s3.asked("GET", ".tar") - before == shards == 5 + 5 + 4


def test_what_is_not_the_manifests_is_refused_and_not_kept(s3, tmp_path):
    there, name = ObjectFolder(f"s3://{s3.bucket}/altered"), "toy/test/0.tar"
    files = ObjectFolder(f"s3://{s3.bucket}/data").read(ObjectFolder(f"s3://{s3.bucket}/data").list())
    for file, content in files.items():
        there.write(file, content[:-512] + bytes(512)[:-1] + b"x" if file == name else content)
    root = mirror_root(there.url, tmp_path)
    with pytest.raises(DataError, match=r"toy/test/0\.tar is not the file that is expected: its SHA-256"):
        open_dataset(root, "toy").split("test").image(0)
    assert not (root / name).exists()


def test_a_download_goes_on_where_it_was_cut_unless_the_object_changed(s3, tmp_path, monkeypatch):
    there = ObjectFolder(f"s3://{s3.bucket}/cut")
    data = bytes(range(256)) * 400
    there.write("a.tar", data)
    address = f"{there.url}/a.tar"
    files, path = filesystem(address)
    tag = version(files.info(path))
    with open_body(address, 1000, tag) as body:
        assert body.start == 1000 and body.length == len(data) - 1000 and body.read() == data[1000:]
    there.write("a.tar", data[::-1])
    with open_body(address, 1000, tag) as body:
        assert body.start == 0 and body.read() == data[::-1]
    download(address, tmp_path / "a.tar", size=len(data))
    assert (tmp_path / "a.tar").read_bytes() == data[::-1]


def test_an_object_of_many_blocks_is_read_whole_and_of_one_version(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "BLOCK", 1000)
    there, data = ObjectFolder(f"s3://{s3.bucket}/blocks"), os.urandom(4321)
    there.write("a.tar", data)
    with open_url(f"{there.url}/a.tar") as stream:
        assert stream.read() == data
    with open_body(f"{there.url}/a.tar") as body:
        body.read(10)
        there.write("a.tar", data[::-1])
        with pytest.raises(Unreachable, match="it changed while it was read"):
            body.read()


def test_a_server_that_stays_silent_is_given_up(tmp_path, monkeypatch):
    import s3fs

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "anything")
        monkeypatch.setattr(objects, "ANSWER_SECONDS", 0.5)
        s3fs.S3FileSystem.clear_instance_cache()
        try:
            for work in (
                lambda: ObjectFolder("s3://bucket/x").write("a", b"content"),
                lambda: open_body("s3://bucket/x/a"),
            ):
                with pytest.raises(Unreachable, match=r"s3://bucket/x/a cannot be reached \(no answer in time\)"):
                    work()
        finally:
            s3fs.S3FileSystem.clear_instance_cache()


def test_absence_refusal_and_silence_are_told_apart_in_one_line(s3, url, tmp_path, monkeypatch):
    assert not has_dataset(mirror_root(url, tmp_path), "absent")
    with pytest.raises(NotThere, match=r"s3://results/data/absent\.tar is not there"):
        open_url(f"{url}/absent.tar")
    with pytest.raises(NotThere, match=r"s3://no-such-bucket/a\.tar is not there"):
        open_url("s3://no-such-bucket/a.tar")
    with pytest.raises(NotThere, match="is a folder and not a file"):
        open_url(f"{url}/toy")
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    # A process reads the settings of its machine once.
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(Unreachable, match=r"s3://results/data/a\.tar cannot be reached \(.*\); try again later"):
            open_url(f"{url}/a.tar")
        with pytest.raises(Unreachable):
            has_dataset(mirror_root(url, tmp_path), "toy")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_no_message_repeats_a_password():
    with pytest.raises(DataUsageError, match="put credentials into the environment") as error:
        open_url("s3://key:hush@bucket/a.tar")
    assert "hush" not in str(error.value)
