"""Checking raw folders: what is wrong is named, and the command that a report gives mends it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from miniature_roots import WRITERS, build

from shards.catalogue import find
from shards.dataset import Dataset
from shards.errors import DataError
from shards.raw.check import RawReport, check_raw
from shards.raw.classnames import imagenet_wnids
from shards.raw.published import raw_source


def checked(name: str, root: Path, **options: object) -> RawReport:
    report = check_raw(find(name), root, **options)  # type: ignore[arg-type]
    for line in (*report.problems, *report.fixes, *report.notes):
        assert line and "\n" not in line and line == line.strip()
    return report


def run_fix(report: RawReport, contains: str) -> None:
    """Type the command of a fix, as a reader of the report would."""
    (fix,) = [fix for fix in report.fixes if contains in fix]
    command = fix.rpartition(": ")[2] if ": " in fix else fix
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and not done.stderr, (command, done.stderr)


def images_there(report: RawReport) -> int:
    return sum(split.there for split in report.splits)


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


@pytest.mark.parametrize("name", WRITERS)
def test_a_partial_set_is_counted_against_the_published_one(name, minis):
    before = sorted(minis.rglob("*"))
    seen: list[tuple[int, int]] = []
    report = checked(name, minis, on_progress=lambda done, total: seen.append((done, total)))
    counts = find(name).counts
    assert report.found and not report.ok and report.dataset == name
    assert report.folder == minis / first_folder(find(name))
    assert [split.name for split in report.splits] == list(counts)
    assert [split.expected for split in report.splits] == list(counts.values())
    source = raw_source(find(name), minis, subset=True)
    assert [split.there for split in report.splits] == list(source.counts.values())
    assert report.undecodable_count == 0 and any("published" in problem for problem in report.problems)
    assert seen[-1] == (images_there(report), images_there(report)) and seen == sorted(seen)
    assert sorted(minis.rglob("*")) == before


def test_broken_roots_give_a_report(tmp_path, minis):
    empty, file, absent = tmp_path / "empty", tmp_path / "file", tmp_path / "absent"
    empty.mkdir()
    file.touch()
    loop = tmp_path / "loop"
    loop.mkdir()
    for name in WRITERS:
        folder = loop / first_folder(find(name))
        folder.symlink_to(folder)
    for root in (empty, file, absent, loop):
        for name in WRITERS:
            report = checked(name, root)
            assert not report.found and not report.ok and not report.splits and len(report.problems) == 1
            assert str(root) in report.problems[0] and report.fixes
            with pytest.raises(DataError, match=str(root)):
                raw_source(find(name), root)
    assert f"{file} is no folder" in checked("dtd", file).problems[0]


def test_folders_that_cannot_be_read_are_reported(minis, tmp_path):
    for name, inner in (("imagenet", "images/train/n01440764"), ("dtd", "images/banded"), ("sun397", "SUN397/a")):
        folder = copied(name, minis, tmp_path)
        (folder / "kept").mkdir()
        shutil.rmtree(folder / inner)
        (folder / inner).symlink_to(folder / inner)
        report = checked(name, tmp_path)
        assert report.found and not report.ok


def test_the_folder_itself_named_as_the_root_is_told_apart(minis):
    report = checked("dtd", minis / "dtd")
    assert not report.found and report.fixes == (f"name the folder above it: {minis}",)
    itself = checked("imagenet-r", minis / "imagenet-rendition")
    assert itself.found and images_there(itself) == images_there(checked("imagenet-r", minis)), (
        "it has the archive's name"
    )


def test_another_selection_of_imagenetv2_is_never_taken_for_the_published_one(minis, tmp_path):
    """All of them have folders 0 to 999 of ten images each: following the advice must not lead there."""
    folder = copied("imagenetv2", minis, tmp_path)
    (folder / "imagenetv2-matched-frequency-format-val").rename(folder / "imagenetv2-threshold0.7-format-val")
    report = checked("imagenetv2", tmp_path)
    assert not report.ok and not any("mv " in fix for fix in report.fixes)
    assert any("another selection" in fix and "matched-frequency" in fix for fix in report.fixes)


def test_images_that_do_not_decode_are_named_by_one_process_or_two(minis, tmp_path, monkeypatch):
    images = copied("dtd", minis, tmp_path) / "images"
    bad = sorted(images.rglob("*.jpg"))[::2]
    for i, file in enumerate(bad):
        file.write_bytes((b"", b"<html>not found</html>", file.read_bytes()[:300])[i % 3])
    monkeypatch.setattr("shards.raw.check.FEW", 0)
    monkeypatch.setattr("shards.raw.check.CHUNK", 3)
    one, two = (checked("dtd", tmp_path, workers=workers) for workers in (1, 2))
    assert one == two and one.undecodable_count == len(bad) and not one.ok
    (problem,) = [problem for problem in one.problems if "cannot be decoded" in problem]
    assert all(path in problem for path in one.undecodable) and "it is empty" in problem
    assert {str(images / path) for path in one.undecodable} <= set(map(str, bad))
    assert checked("dtd", tmp_path, decode=False).undecodable_count == 0


def test_flat_validation_images_are_moved_by_the_command_where_their_classes_are_known(minis, tmp_path, monkeypatch):
    folder = copied("imagenet", minis, tmp_path)
    val = folder / "images" / "val"
    before = sorted(file.relative_to(val) for file in val.rglob("*.JPEG"))
    for path in before:
        os.rename(val / path, val / path.name)
        (val / path.parent).rmdir() if not any((val / path.parent).iterdir()) else None
    report = checked("imagenet", tmp_path)
    assert any(f"{val} holds 20 files and no class folder" in problem for problem in report.problems)
    (fix,) = [fix for fix in report.fixes if "valprep.sh" in fix]
    assert "ILSVRC2012_img_val.tar" in fix and "from torchvision.datasets import ImageNet" in fix
    # torchvision sorts into `val` below the folder it is given, and only where that is not there yet.
    assert fix.endswith(f" {val.parent}") and f"mv -i {val} {val}-unsorted && " in fix
    lines = [f"{path.stem},{path.parent} 1 2 3 4 {path.parent} 5 6 7 8" for path in before]
    (folder / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *lines]) + "\n")
    monkeypatch.chdir(tmp_path.parent)
    run_fix(checked("imagenet", Path(tmp_path.name)), "LOC_val_solution.csv")
    assert sorted(file.relative_to(val) for file in val.rglob("*.JPEG")) == before
    assert images_there(checked("imagenet", tmp_path)) == images_there(checked("imagenet", minis))


def test_class_archives_in_train_are_unpacked_by_the_command(minis, tmp_path):
    train = copied("imagenet", minis, tmp_path) / "images" / "train"
    for folder in sorted(train.glob("n*")):
        with tarfile.open(train / f"{folder.name}.tar", "w") as archive:
            for file in folder.glob("*.JPEG"):
                archive.add(file, file.name)
        shutil.rmtree(folder)
    report = checked("imagenet", tmp_path)
    assert any("10 class archives that are not unpacked" in problem for problem in report.problems)
    run_fix(report, "tar -xf")
    assert images_there(checked("imagenet", tmp_path)) == images_there(checked("imagenet", minis))


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_too_deep_is_lifted_by_the_command(name, minis, tmp_path):
    folder = copied(name, minis, tmp_path)
    deep = tmp_path / "set aside" / "unpacked here"
    deep.parent.mkdir()
    os.rename(folder, deep)
    folder.mkdir()
    os.rename(deep, folder / "unpacked here")
    report = checked(name, tmp_path)
    assert not report.ok and "no images in" in report.problems[0] and not report.splits
    run_fix(report, "too deep")
    assert images_there(checked(name, tmp_path)) == images_there(checked(name, minis))


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("food101", "food-101.tar.gz"),
        ("imagenet-r", "imagenet-r.tar"),
        ("imagenet-a", "imagenet-a.tar"),
        ("imagenetv2", "imagenetv2-matched-frequency.tar.gz"),
        ("eurosat", "EuroSAT.zip"),
        ("ucf101", "UCF-101-midframes.zip"),
        ("dtd", "dtd-r1.0.1.tar.gz"),
        ("caltech101", "caltech-101.zip"),
        ("imagenet-sketch", "ImageNet-Sketch.zip"),
        ("sun397", "SUN397.tar.gz"),
        ("stanford-cars", "cars_train.tgz"),
        ("oxford-flowers", "102flowers.tgz"),
    ],
)
def test_an_archive_that_was_not_unpacked_is_named_and_unpacked_by_the_command(name, archive, minis, tmp_path):
    raw = find(name).raw
    assert raw
    images = minis / raw.folders[0] / raw.images[0]
    (tmp_path / "raw").mkdir()
    file = tmp_path / "raw" / archive
    inside = images.name if raw.images[0] != "." else "."
    if archive.endswith(".zip"):
        with zipfile.ZipFile(file, "w") as packed:
            for image in images.rglob("*"):
                packed.write(image, f"{inside}/{image.relative_to(images)}")
    else:
        with tarfile.open(file, "w:gz") as packed_tar:
            packed_tar.add(images, inside)
    report = checked(name, tmp_path / "raw")
    assert not report.found and f"{archive} is not unpacked" in report.fixes[0]
    if archive.endswith(".zip") and shutil.which("unzip") is None:
        return
    run_fix(report, archive)
    report = checked(name, tmp_path / "raw")
    assert report.found and not any("no images" in problem for problem in report.problems)
    for other in set(WRITERS) - {name}:
        assert not any(archive in fix for fix in checked(other, tmp_path / "raw").fixes), other


def packed_in(archive: Path, *members: tuple[Path, str]) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for path, name in members:
            tar.add(path, name)


def test_an_archive_inside_an_archive_is_unpacked_in_two_steps(minis, tmp_path):
    """caltech-101.zip holds 101_ObjectCategories.tar.gz; unpacking the outer one again would lead nowhere."""
    packed_in(tmp_path / "inner.tar.gz", (minis / "caltech-101" / "101_ObjectCategories", "101_ObjectCategories"))
    packed_in(
        tmp_path / "raw" / "caltech-101.tar.gz",
        (tmp_path / "inner.tar.gz", "caltech-101/101_ObjectCategories.tar.gz"),
    )
    run_fix(checked("caltech101", tmp_path / "raw"), "caltech-101.tar.gz is not unpacked")
    run_fix(checked("caltech101", tmp_path / "raw"), "101_ObjectCategories.tar.gz is not unpacked")
    assert not any("no images" in problem for problem in checked("caltech101", tmp_path / "raw").problems)


def test_trimaps_are_not_taken_for_the_pictures_of_pets(minis, tmp_path):
    trimaps = tmp_path / "oxford_pets" / "annotations" / "trimaps"
    trimaps.mkdir(parents=True)
    (trimaps / "Abyssinian_1.png").touch()
    report = checked("oxford-pets", tmp_path)
    assert "no images" in report.problems[0] and report.fixes[0].startswith("get images.tar.gz")


def test_what_needs_no_mending_is_no_problem(minis, tmp_path):
    folder = copied("imagenet-sketch", minis, tmp_path)
    os.rename(folder / "images", folder / "sketch")
    report = checked("imagenet-sketch", tmp_path)
    assert len(report.problems) == 1 and "published 50,889" in report.problems[0]
    assert report.notes == (
        f"images are read from {folder / 'sketch'}, which CoOp has as {folder / 'images'}: nothing need be renamed",
    )
    assert not (folder / "classnames.txt").exists(), "names come with the program"
    assert "no digest" in checked("food101", minis).notes[0]


def test_missing_images_lists_and_classes_are_named(minis, tmp_path):
    folder = copied("dtd", minis, tmp_path)
    first, *rest = sorted((folder / "images" / "banded").iterdir())
    for file in rest:
        file.unlink()
    report = checked("dtd", tmp_path)
    missing = {path for split in report.splits for path in split.missing}
    assert missing == {f"banded/{file.name}" for file in rest} and first.exists()
    assert any("images are missing: banded/" in problem for problem in report.problems)
    (folder / "split_zhou_DescribableTextures.json").unlink()
    report = checked("dtd", tmp_path)
    assert report.found and "official split file" in report.problems[0] and "--random-split" in report.fixes[0]
    images = copied("imagenet", minis, tmp_path) / "images"
    shutil.rmtree(images / "train" / imagenet_wnids()[657])
    shutil.rmtree(images / "val")
    train, test = checked("imagenet", tmp_path).splits
    assert (train.there, test.there) == (36, 0)
