"""`procap data` on the fifteen published layouts, derived sets and own data: from raw folders to a trained table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import run
from miniature_roots import build, build_all
from toy_shards import toy_source

from benchmarks.cli import main
from benchmarks.cli.data_sources import DatasetToPack
from shards.catalogue import CATALOGUE
from shards.pack import pack_source
from shards.reader import open_dataset
from shards.resolve import packed_names

ROOT = Path(__file__).resolve().parents[1]
RAW_SETS = [dataset for dataset in CATALOGUE.values() if dataset.source == "folder"]


pytestmark = pytest.mark.usefixtures("at_home")


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    return build_all(tmp_path_factory.mktemp("raw"), per_class=4, classes=4)


@pytest.fixture(scope="module")
def packed(raw, tmp_path_factory) -> Path:
    data, before = tmp_path_factory.mktemp("packed"), contents(raw)
    assert main(["data", "pack", "paper", "--subset", "--raw", str(raw), "--data", str(data)]) == 0
    assert contents(raw) == before, "raw folders are only read"
    return data


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_all_published_sets_are_packed_from_raw_folders(packed, capsys):
    names = [f"{dataset.name}-subset" for dataset in RAW_SETS]
    assert packed_names(packed) == sorted(names)
    code, out, err = run(capsys, "data", "check", "--data", packed)
    assert code == 0 and all(name in out for name in names), err


def test_the_raw_check_lists_what_is_there_and_how_to_repair_it(raw, tmp_path, capsys):
    part = tmp_path / "raw"
    shutil.copytree(raw / "dtd", part / "dtd")
    (part / "dtd" / "split_zhou_DescribableTextures.json").unlink()
    code, out, err = run(capsys, "data", "check", "--raw", part)
    assert code == 1
    assert "split_zhou_DescribableTextures.json is missing" in err and "--random-split" in err
    assert "14 not found" in err
    assert out.count("not found") == 14


def test_train_evaluate_and_table_on_subsets(packed, tmp_path, capsys):
    """Half of the classes of one set, all of another, and a set that has test images only."""
    at = ["--data", packed, "--results", tmp_path / "results", "--tracking", "off"]
    common = ["--methods", "coop", "--epochs", "1", "--shots", "2", "--batch-size", "4"]
    for extra in (["--datasets", "oxford-pets-subset"], ["--datasets", "eurosat-subset", "--classes", "all"]):
        code, _, err = run(capsys, "train", *common, *extra, *at)
        assert code == 0, err
    code, _, err = run(capsys, "eval", *common, "--datasets", "oxford-pets-subset", *at)
    assert code == 0, err
    targets = "eurosat-subset,imagenet-r-subset,UCF101-subset"
    code, _, err = run(
        capsys, "eval", *common, "--datasets", "eurosat-subset", "--classes", "all", "--targets", targets, *at
    )
    assert code == 0, err
    code, out, err = run(capsys, "table", "--results", tmp_path / "results")
    assert code == 0 and "oxford-pets-subset" in out
    assert "subset: 16 of 7,349 images" in out
    code, out, err = run(capsys, "table", "--results", tmp_path / "results", "--format", "json")
    assert code == 0 and "subset: 16 of 7,349 images" in out


def test_an_own_split_and_smaller_images_are_other_data_sets(tmp_path, capsys):
    raw, data = tmp_path / "raw", tmp_path / "data"
    build("caltech101", raw, 4)
    code, _, err = run(
        capsys, "data", "pack", "caltech101", "--raw", raw, "--data", data, "--random-split", "7", "--resize", "48"
    )
    assert code == 0, err
    manifest = open_dataset(data, "caltech101-split7-48px").manifest
    assert "random split, seed 7" in manifest.variant and manifest.resize == 48
    images = open_dataset(data, "caltech101-split7-48px").split("test")
    assert {min(images.image(i).size) for i in range(len(images))} == {48}


def test_own_data_by_one_yaml_file(raw, tmp_path, capsys):
    shutil.copytree(raw / "eurosat" / "2750", tmp_path / "fields")
    (tmp_path / "land.yaml").write_text(
        "name: my-land\ntemplate: a satellite photo of {}.\nfolder: fields\n"
        "split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}\n"
    )
    at = ["--data", tmp_path / "data"]
    code, _, err = run(capsys, "data", "pack", "land.yaml", *at)
    assert code == 0, err
    run_it = ["--methods", "zeroshot", "--datasets", "my-land", *at, "--tracking", "off"]
    assert run(capsys, "train", *run_it)[0] == 0
    assert run(capsys, "eval", *run_it)[0] == 0
    code, out, _ = run(capsys, "table")
    assert code == 0 and "my-land" in out
    code, out, _ = run(capsys, "ls", "datasets", *at)
    assert code == 0 and "my-land" in out
    assert run(capsys, "data", "show", "my-land", *at)[0] == 0 and (tmp_path / "my-land-test.png").exists()


WRONG = [
    (["pack", "caltech101"], 2, "--raw"),
    (["pack", "caltech101", "--raw", "nowhere"], 2, "nowhere is not there"),
    (["pack", "caltech"], 2, "did you mean caltech101"),
    (["pack", "imagenet-a", "--random-split", "1", "--raw", "RAW"], 2, "no random split"),
    (["pack", "dtd", "--resize", "4", "--raw", "RAW"], 2, "at least 16"),
    (["pack", "dtd", "--subset", "--raw", "RAW", "--data", "RAW"], 2, "lies in the raw data"),
    (["pack", "paper", "--from", "somewhere", "--raw", "RAW"], 2, "name it instead of 'paper'"),
    (["pack", "dtd", "--random-split", "1", "--subset", "--raw", "RAW"], 2, "leave out --subset"),
    (["pack", "world", "--subset"], 2, "drawn as it is"),
    (["pack", "dtd-split3", "--random-split", "4", "--raw", "RAW"], 2, "two data sets"),
    (["pack", "shapes", "dtd", "--from", "somewhere"], 2, "one data set"),
    (["pack", "food101", "--from", "https://127.0.0.1:9/wds_food101"], 2, "official"),
    (["pack", "shapes", "--data", "https://127.0.0.1:9/shards"], 2, "packed into a folder"),
    (["pack", "missing.yaml"], 2, "missing.yaml"),
    (["check", "shapes", "--raw", "RAW"], 2, "no raw folder"),
    (["show", "caltech101"], 1, "no shards of 'caltech101'"),
]


@pytest.mark.parametrize(
    ("line", "code", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input_is_an_error_of_one_line(capsys, raw, line, code, message):
    words = [word.replace("RAW", str(raw)) for word in line]
    got, _, err = run(capsys, "data", *words)
    assert got == code, err
    assert len(err.strip().splitlines()) == 1 and message in err, err


def test_the_data_page_names_every_raw_folder_and_list():
    page = (ROOT / "docs" / "data.md").read_text()
    for dataset in RAW_SETS:
        assert dataset.raw
        row = next(line for line in page.splitlines() if line.startswith(f"| `{dataset.name}` "))
        assert f"`{dataset.raw.folders[0]}`" in row
        assert dataset.raw.split_file in row
        assert dataset.raw.images[0].strip(".") in row


def test_one_set_that_fails_does_not_stop_the_others(tmp_path, capsys):
    raw = tmp_path / "raw"
    build("dtd", raw, 3, 2)
    build("eurosat", raw, 3, 2)
    next((raw / "dtd" / "images").rglob("*.jpg")).write_bytes(b"no image")
    code, out, err = run(
        capsys, "data", "pack", "dtd", "eurosat", "--subset", "--raw", raw, "--data", tmp_path / "data"
    )
    assert code == 3
    assert "eurosat-subset" in out and "'dtd-subset'" in err
    assert packed_names(tmp_path / "data") == ["eurosat-subset"]


def test_a_plan_fetches_nothing(tmp_path, capsys):
    """Nothing listens on that port: a request would fail."""
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ntemplate: a {}.\nshards: http://127.0.0.1:9/mine\nclasses: [a, b]\n"
    )
    for name, more in (("imagenet-a", ["--from", "http://127.0.0.1:9/wds_imagenet-a"]), ("mine.yaml", [])):
        code, out, err = run(capsys, "data", "pack", name, *more, "--dry-run", "--data", tmp_path / "data")
        assert code == 0 and "to be fetched and packed" in out, err
    assert not (tmp_path / "home").exists()


def test_a_list_without_a_digest_is_packed_with_a_warning(tmp_path, capsys, monkeypatch):
    from shards.raw import published as reader

    monkeypatch.setattr(reader, "published_differences", lambda dataset, listing: iter(()))
    for name in ("food101", "dtd"):
        build(name, tmp_path / "raw", 3, 2)
    code, _, err = run(capsys, "data", "pack", "food101", "dtd", "--raw", tmp_path / "raw", "--data", tmp_path / "data")
    assert code == 0 and "food101: no digest of split_zhou_Food101.json is known" in err
    assert "a private split of the same sizes" in err and "dtd: " not in err


def test_the_repair_of_a_broken_set_depends_on_its_source(raw, packed, tmp_path, capsys):
    shutil.copytree(packed / "dtd-subset", tmp_path / "data" / "dtd-subset")
    (tmp_path / "land.yaml").write_text(f"name: my-land\ntemplate: a {{}}.\nfolder: {raw}/eurosat/2750\nsplit: test\n")
    at = ["--data", tmp_path / "data"]
    assert run(capsys, "data", "pack", "land.yaml", "digits", *at)[0] == 0
    for name in ("dtd-subset", "my-land", "digits"):
        (tmp_path / "data" / name / "test" / "0.tar").write_bytes(b"")
    code, _, err = run(capsys, "data", "check", *at)
    assert code == 1
    assert f"procap data pack digits dtd-subset --raw FOLDER --force --data {tmp_path / 'data'}" in err
    assert "from their YAML files: my-land: procap data pack FILE.yaml --force" in err
    for command in (["digits"], ["dtd-subset", "--raw", raw], ["land.yaml"]):
        assert run(capsys, "data", "pack", *command, "--force", *at)[0] == 0
    assert run(capsys, "data", "check", *at)[0] == 0


def test_published_shards_that_are_not_all_there_are_fetched_again(tmp_path):
    pack_source(toy_source(origin="published"), tmp_path)
    wanted = DatasetToPack("toy", toy_source, origin="published")
    assert wanted.packed_in(tmp_path) == open_dataset(tmp_path, "toy").manifest
    (tmp_path / "toy/test/0.tar").unlink()
    assert wanted.packed_in(tmp_path) is None


def test_published_test_images_do_not_replace_a_whole_set_without_force(tmp_path, capsys, monkeypatch):
    from shards.raw import published as reader

    monkeypatch.setattr(reader, "published_differences", lambda dataset, listing: iter(()))
    build("oxford-pets", tmp_path / "raw", 3, 2)
    at = ["--data", tmp_path / "data"]
    assert run(capsys, "data", "pack", "oxford-pets", "--raw", tmp_path / "raw", *at)[0] == 0
    code, _, err = run(capsys, "data", "pack", "oxford-pets", "--from", tmp_path / "wds_vtab-pets", *at)
    assert code == 2 and "is packed in" in err and "with train, val, test: --from has test images alone" in err
    assert set(open_dataset(tmp_path / "data", "oxford-pets").manifest.splits) == {"train", "val", "test"}


def test_a_subset_without_test_images_is_refused_before_anything_is_trained_on_it(tmp_path, capsys):
    raw = tmp_path / "raw"
    shutil.rmtree(build("imagenet", raw, 3) / "images" / "val")
    code, _, err = run(capsys, "data", "pack", "imagenet", "--subset", "--raw", raw, "--data", tmp_path / "data")
    assert code == 1 and packed_names(tmp_path / "data") == []
    assert len(err.strip().splitlines()) == 1
