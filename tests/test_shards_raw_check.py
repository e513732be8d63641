"""Check raw folders: problems are named, with what would fix them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from miniature_roots import WRITERS, build

from shards.catalogue import Dataset, derive_dataset, find
from shards.errors import DataError
from shards.raw.classnames import imagenet_wnids
from shards.raw.published import RawReport, check_raw, raw_source


def checked(name: str, root: Path, **options: object) -> RawReport:
    report = check_raw(find(name), root, **options)  # type: ignore[arg-type]
    for line in (*report.problems, *report.fixes):
        assert line and "\n" not in line and line == line.strip()
    return report


def images_there(report: RawReport) -> int:
    return sum(split.present for split in report.splits)


@pytest.fixture(scope="module")
def minis(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("minis")
    for name in WRITERS:
        build(name, root, per_class=4, classes=None if find(name).classes == 1000 else 2)
    return root


def copied(name: str, minis: Path, root: Path) -> Path:
    folder = first_folder(find(name))
    shutil.copytree(minis / folder, root / folder)
    return root / folder


def first_folder(dataset: Dataset) -> str:
    assert dataset.raw
    return dataset.raw.folders[0]


@pytest.mark.parametrize("name", ["imagenet", "caltech101", "fgvc-aircraft", "imagenet-r"])
def test_a_partial_set_is_counted_against_the_published_one(name, minis):
    before = sorted(minis.rglob("*"))
    calls: list[tuple[int, int]] = []
    report = checked(name, minis, on_progress=lambda done, total: calls.append((done, total)))
    counts = find(name).counts
    assert report.folder and not report.ok and report.dataset == name
    assert report.folder == minis / first_folder(find(name))
    assert {split.name: split.expected for split in report.splits} == dict(counts)
    source = raw_source(derive_dataset(find(name), subset=True), minis)
    assert [split.present for split in report.splits] == list(source.counts.values())
    assert any("published" in problem for problem in report.problems)
    assert calls[-1] == (images_there(report), images_there(report)) and calls == sorted(calls)
    assert sorted(minis.rglob("*")) == before


def test_broken_roots_give_a_report(tmp_path):
    empty, file, absent, loop = (tmp_path / name for name in ("empty", "file", "absent", "loop"))
    empty.mkdir()
    loop.mkdir()
    file.touch()
    for name in WRITERS:
        folder = loop / first_folder(find(name))
        folder.symlink_to(folder)
        for root in (empty, file, absent, loop):
            report = checked(name, root)
            assert not report.folder and not report.ok and not report.splits and len(report.problems) == 1
            assert str(root) in report.problems[0] and report.fixes
            with pytest.raises(DataError, match=str(root)):
                raw_source(find(name), root)


def test_folders_that_cannot_be_read_are_reported(minis, tmp_path):
    for name, inner in (("imagenet", "images/train/n01440764"), ("dtd", "images/banded"), ("sun397", "SUN397/a")):
        folder = copied(name, minis, tmp_path)
        shutil.rmtree(folder / inner)
        (folder / inner).symlink_to(folder / inner)
        report = checked(name, tmp_path)
        assert report.folder and not report.ok


def test_the_data_set_folder_given_as_root_is_explained(minis):
    report = checked("dtd", minis / "dtd")
    assert not report.folder and report.fixes == (f"name the folder above it: {minis}",)


def test_images_that_do_not_decode_are_named_by_one_process_or_two(minis, tmp_path, monkeypatch):
    images = copied("dtd", minis, tmp_path) / "images"
    bad = sorted(images.rglob("*.jpg"))[::4]
    for i, file in enumerate(bad):
        file.write_bytes((b"", b"<html>not found</html>", file.read_bytes()[:300])[i % 3])
    monkeypatch.setattr("shards.raw.published.FEW", 0)
    monkeypatch.setattr("shards.raw.published.CHUNK", 3)
    one, two = (checked("dtd", tmp_path, workers=workers) for workers in (1, 2))
    assert one == two and not one.ok
    (problem,) = [problem for problem in one.problems if "cannot be decoded" in problem]
    assert f"{len(bad)} images" in problem and "it is empty" in problem
    assert all(str(file.relative_to(images)) in problem for file in bad)
    assert not any("decoded" in problem for problem in checked("dtd", tmp_path, decode=False).problems)


def test_validation_images_without_class_folders_are_reported(minis, tmp_path):
    val = copied("imagenet", minis, tmp_path) / "images" / "val"
    for file in list(val.rglob("*.JPEG")):
        file.rename(val / file.name)
    for folder in val.glob("n*/"):
        folder.rmdir()
    report = checked("imagenet", tmp_path)
    assert any(f"{val} holds 20 files and no class folder" in problem for problem in report.problems)
    assert any("valprep.sh" in fix for fix in report.fixes)


def test_trimaps_are_not_taken_for_the_images_of_pets(tmp_path):
    trimaps = tmp_path / "oxford_pets" / "annotations" / "trimaps"
    trimaps.mkdir(parents=True)
    (trimaps / "Abyssinian_1.png").touch()
    report = checked("oxford-pets", tmp_path)
    assert "no images" in report.problems[0] and report.fixes[0].startswith("get images.tar.gz")


def test_missing_images_lists_and_classes_are_named(minis, tmp_path):
    folder = copied("dtd", minis, tmp_path)
    for file in sorted((folder / "images" / "banded").iterdir())[1:]:
        file.unlink()
    report = checked("dtd", tmp_path)
    assert images_there(report) == 5
    assert any("images are missing: 'banded/" in problem for problem in report.problems)
    (folder / "split_zhou_DescribableTextures.json").unlink()
    report = checked("dtd", tmp_path)
    assert report.folder and "official split file" in report.problems[0] and "--random-split" in report.fixes[0]
    images = copied("imagenet", minis, tmp_path) / "images"
    shutil.rmtree(images / "train" / imagenet_wnids()[657])
    shutil.rmtree(images / "val")
    train, test = checked("imagenet", tmp_path).splits
    assert (train.present, test.present) == (36, 0)
