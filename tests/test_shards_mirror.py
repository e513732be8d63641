"""Data roots behind a URL: downloaded as far as they are read, verified before use, never mixed up."""

import json
import multiprocessing
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from local_server import LocalServer
from toy_shards import COUNTS, is_whole, pixels, toy_records, toy_source

from benchmarks.cli import main
from procap.errors import NotFound, Unreachable, UsageError, UserError
from shards import mirror
from shards.check import check_dataset
from shards.mirror import mirror_root, refresh
from shards.pack import pack_source
from shards.reader import ImageList, open_dataset
from shards.remote import upload
from shards.resolve import is_packed, resolve_dataset
from shards.source import ImageRecord, png


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    pack_source(toy_source(per_shard=5), root)
    return root


@pytest.fixture
def server(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with LocalServer(Path(shutil.copytree(packed, tmp_path / "www"))) as running:
        yield running


@pytest.fixture
def root(server, tmp_path) -> Path:
    return mirror_root(server.url, tmp_path / "cache")


def begin_command() -> None:
    """What `procap` does first: servers are asked again."""
    refresh.cache_clear()


def same_images(split: ImageList, name: str) -> bool:
    same = all(np.array_equal(np.asarray(split.image(i)), pixels(name, i)) for i in range(len(split)))
    return same and len(split) == COUNTS[name]


def cached_tars(root: Path) -> list[str]:
    return sorted(str(file.relative_to(folder_of(root).parent)) for file in root.rglob("*.tar"))


def folder_of(root: Path) -> Path:
    """The only folder of `root` with the files of a manifest."""
    [lists] = root.glob("*/toy/manifest.json")
    return lists.parent


def change_manifest(server, change):
    file = server.folder / "toy" / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_mirror_reads_like_the_folder_it_mirrors(server, root, packed):
    ours, theirs = open_dataset(root, "toy"), open_dataset(packed, "toy")
    assert ours.manifest == theirs.manifest and ours.classnames == theirs.classnames
    for name in COUNTS:
        own, other = ours.open_images(name), theirs.open_images(name)
        assert same_images(own, name) and own.paths == other.paths
        assert ours.labels(name).tolist() == theirs.labels(name).tolist()


def test_splits_are_downloaded_when_they_are_opened(server, root):
    dataset = open_dataset(root, "toy")
    assert server.paths() == ["/toy/manifest.json"]
    dataset.labels("train")
    assert server.paths()[1:] == ["/toy/train/index.npy", "/toy/train/paths.txt"]
    dataset.open_images("train").image(7)
    assert cached_tars(root) == [f"toy/train/{number}.tar" for number in range(5)]


def test_without_the_server_a_complete_copy_works_with_a_warning(server, root):
    same_images(open_dataset(root, "toy").open_images("test"), "test")
    server.stop()
    begin_command()
    with pytest.warns(UserWarning, match="cannot be reached.*the copy of 'toy' in .* is used"):
        dataset = open_dataset(root, "toy")
    assert same_images(dataset.open_images("test"), "test")
    with pytest.raises(Unreachable, match=r"/toy/train/index\.npy cannot be reached"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        open_dataset(root, "toy").open_images("train")


def test_a_missing_data_set_is_named(server, root):
    with pytest.raises(NotFound) as error:
        open_dataset(root, "eurosat")
    assert str(error.value).startswith(f"{server.url}/eurosat/manifest.json is not there")
    assert not (root / "eurosat").exists()
    assert is_packed(root, "toy") and not is_packed(root, "eurosat") and not is_packed(root, "../toy")


def test_an_altered_shard_on_the_server_is_refused_by_name(server, root):
    file = server.folder / "toy" / "test" / "1.tar"
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError) as error:
        open_dataset(root, "toy").open_images("test")
    assert f"{server.url}/toy/test/1.tar is not the expected file: its SHA-256 is not" in str(error.value)
    assert cached_tars(root) == ["toy/test/0.tar"]


@pytest.mark.parametrize("damage", ["cut", "index"])
def test_files_damaged_in_the_mirror_are_downloaded_again(server, root, damage):
    same_images(open_dataset(root, "toy").open_images("test"), "test")
    file = folder_of(root) / "test" / ("index.npy" if damage == "index" else "0.tar")
    data = file.read_bytes()
    file.write_bytes(data[:-512] if damage == "cut" else data[:300] + bytes([data[300] ^ 1]) + data[301:])
    server.asked.clear()
    assert same_images(open_dataset(root, "toy").open_images("test"), "test")
    assert len(server.paths(file.name)) == 1 and file.read_bytes() == data


def test_a_repacked_set_replaces_its_copy(server, root):
    before = open_dataset(root, "toy").open_images("test")
    same_images(before, "test")

    def other_last_image(split: str):
        for i, record in enumerate(toy_records(split)):
            changed = split == "test" and i == COUNTS["test"] - 1
            yield ImageRecord(record.path, record.label, png(np.zeros((3, 3, 3), np.uint8))) if changed else record

    shutil.rmtree(server.folder / "toy")
    pack_source(toy_source(other_last_image, per_shard=5), server.folder)
    assert same_images(open_dataset(root, "toy").open_images("test"), "test"), "also when it opens it again"
    begin_command()
    after = open_dataset(root, "toy").open_images("test")
    assert np.asarray(after.image(16)).max() == 0
    assert np.array_equal(np.asarray(after.image(0)), pixels("test", 0))
    assert same_images(before, "test"), "a command keeps what it has opened"


@pytest.mark.parametrize("change", [
    lambda m: m["splits"]["test"]["shards"][0].update(file="../../escaped.tar"),
    lambda m: m["splits"].update({"../../escaped": m["splits"]["test"]}),
    lambda m: m.update(dataset="../toy"),
    lambda m: m.update(dataset="other"),
])  # fmt: skip
def test_a_manifest_is_not_trusted(server, root, change):
    change_manifest(server, change)
    with pytest.raises(UserError) as error:
        open_dataset(root, "toy")
    assert "\n" not in str(error.value) and f"{server.url}/toy/manifest.json" in str(error.value)
    assert not list(root.parents[2].rglob("*escaped*")) and not (root / "toy" / "manifest.json").exists()


def test_a_file_that_does_not_end_where_it_should_fills_no_disk(server, root, tmp_path, monkeypatch):
    """Lists may have 4 kB for each image, shards what the manifest says."""
    folder = server.folder / "toy"
    index, shard = folder / "test/index.npy", next(folder.glob("train/*.tar"))
    for file in (index, shard):
        file.write_bytes(file.read_bytes() + bytes(2**20))
    with pytest.raises(UserError, match=r"index\.npy is not the expected file: it has more than [0-9,]+ bytes"):
        open_dataset(root, "toy").labels("test")
    with pytest.raises(UserError, match=r"\.tar is not the expected file: it has more than [0-9,]+ bytes"):
        open_dataset(root, "toy").open_images("train")
    assert not any(file.stat().st_size >= 2**20 for file in tmp_path.joinpath("cache").rglob("*") if file.is_file())
    monkeypatch.setattr(mirror, "MANIFEST_BYTES", 100)
    begin_command()
    with pytest.raises(UserError, match=r"manifest\.json is not the expected file: it has more than 100 bytes"):
        open_dataset(root, "toy")


@pytest.mark.parametrize("name", ["../toy", "/etc", "toy/../toy", ".hidden", "a b"])
def test_names_of_data_sets_cannot_leave_the_root(server, root, name):
    assert not is_packed(root, name)
    with pytest.raises(UsageError, match="cannot be the name"):
        open_dataset(root, name)
    assert not server.asked


def test_a_check_of_a_mirror_covers_what_was_downloaded(server, root, capsys):
    assert main(["data", "check", "--data", str(root)]) == 1
    assert f"no data set of {server.url} was opened here: name those to check" in capsys.readouterr().err
    open_dataset(root, "toy").open_images("train")
    server.asked.clear()
    report = check_dataset(root, "toy")
    counts = {split.name: (split.readable, split.shards, split.shards_present) for split in report}
    assert is_whole(root, "toy") and counts == {"train": (23, 5, 5), "val": (0, 5, 0), "test": (0, 4, 0)}
    assert not server.paths(".tar")
    file = folder_of(root) / "train" / "1.tar"
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    report = check_dataset(root, "toy")
    assert not is_whole(root, "toy") and f"{file} is altered" in report[0].problems[0]
    assert not server.paths(".tar"), "a check reports, it does not repair"
    assert main(["data", "check", "--data", str(root)]) == 1
    advice = capsys.readouterr().err.splitlines()[-1]
    assert advice.endswith(f"to repair 'toy', delete {folder_of(root)} and it is fetched again")
    shutil.rmtree(folder_of(root))
    begin_command()
    assert len(open_dataset(root, "toy").open_images("train")) == COUNTS["train"] and is_whole(root, "toy")


def test_secrets_in_a_url_are_refused_and_not_printed(server, tmp_path):
    for url in (f"http://me:hush@{server.host}", f"http://{server.host}/?token=hush"):
        with pytest.raises(UsageError, match=r"put it into ~/\.netrc") as error:
            mirror_root(url, tmp_path / "cache")
        assert "hush" not in str(error.value)


def test_a_cache_that_cannot_be_written_is_named_with_its_variable():
    with pytest.raises(UserError, match=r"^cannot write /proc/cache/mirrors/\S+: No such file .*; set PROCAP_HOME to"):
        mirror_root("http://127.0.0.1:1/data", Path("/proc/cache"))


def test_a_set_that_is_not_at_a_url_or_a_url_without_its_driver_is_no_wrong_name(server, tmp_path):
    with pytest.raises(UsageError, match=rf"unknown data set 'colours': {server.url}/no/colours/manifest\.json is not"):
        resolve_dataset("colours", mirror_root(f"{server.url}/no", tmp_path))
    with pytest.raises(UsageError, match=r"foo://bucket/x/colours/manifest\.json cannot be opened"):
        resolve_dataset("colours", mirror_root("foo://bucket/x", tmp_path))


def read_all(splits: list[ImageList]) -> bool:
    return all(same_images(split, name) for split, name in zip(splits, COUNTS, strict=True))


def test_processes_read_a_data_root_in_an_object_store_and_fetch_each_shard_once(s3, packed, tmp_path):
    url = f"s3://{s3.bucket}/data"
    for file in (packed / "toy").rglob("*"):
        if file.is_file():
            upload(file, f"{url}/{file.relative_to(packed).as_posix()}")
    before = s3.count_requests("GET", ".tar")
    root = mirror_root(f"{url}/", tmp_path)
    splits = [open_dataset(root, "toy").open_images(name) for name in COUNTS]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(read_all, [splits, splits]) == [True, True]
    assert s3.count_requests("GET", ".tar") - before == len(list(root.rglob("*.tar"))) == 5 + 5 + 4
    assert is_packed(root, "toy") and not is_packed(root, "digits")
