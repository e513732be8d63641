"""`procap data pack` on folders without a YAML file: the layout that is guessed, and the layouts that are refused."""

import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import read_files, run
from own_images import CLASSES, put, put_classes
from PIL import ExifTags, Image

from shards.reader import open_dataset

pytestmark = pytest.mark.usefixtures("at_home")


@pytest.mark.parametrize(("layout", "keys"), [
    ("images/deep/{c}", {"folder": "birds/images/deep", "split": {"train": 0.5, "val": 0.2, "test": 0.3, "seed": 1}}),
    ("{s:train,val,test}/{c}/images", {"folder": "birds"}),
    ("{s:Training,valid,test}/{c}", {"folder": "birds"}),
    ("x/{s:train,val}/{c}", {"folder": "birds/x"}),
    ("table", {"table": "birds/labels.csv", "images": "birds/pictures"}),
])  # fmt: skip
def test_the_layout_of_a_folder_is_guessed(tmp_path, capsys, layout, keys):
    root = tmp_path / "birds"
    splits = re.findall(r"{s:(.*?)}", layout)
    if layout == "table":
        put_classes(root / "pictures")
        lines = [f"{name}/{i:02d}.png,{name},{('train', 'test')[i % 2]}" for name in CLASSES for i in range(2)]
        (root / "labels.csv").write_text("\n".join(["filename,class,split", *lines]))
    else:
        for split in splits[0].split(",") if splits else [""]:
            folder, _, inner = re.sub(r"{s:.*?}", split, layout).partition("{c}")
            put_classes(root / folder, [f"{name}{inner}" for name in CLASSES])
            put(root / folder / "loose.png")
    code, _, err = run(capsys, "data", "pack", root, "--data", tmp_path / "data", "--workers", "1")
    assert code == 0, err
    written = yaml.safe_load(text := (tmp_path / "birds.yaml").read_text())
    assert all(f"\n{key}:" in text for key in written), "a line for each key"
    assert {key: written[key] for key in keys} == keys
    assert ("split" in written) == ("{s:" not in layout and layout != "table")
    manifest = open_dataset(tmp_path / "data", "birds").manifest
    assert {*manifest.splits} >= {"train", "test"} and {*manifest.classnames} == {*CLASSES}
    put_classes(tmp_path / "other" / "birds", each=6)
    code, _, err = run(capsys, "data", "pack", tmp_path / "other" / "birds", "--data", tmp_path / "data")
    assert code == 2 and "'birds' was packed from another folder than" in err
    assert open_dataset(tmp_path / "data", "birds").manifest == manifest


@pytest.mark.parametrize(("content", "words"), [
    ("flat", "holds no folders (left out: 4 files"),
    ("empty", "holds no folders: put the images of each class into a folder, such as train/CLASS"),
    ("file", "labels.csv is no folder"),
])  # fmt: skip
def test_a_folder_whose_layout_is_not_clear_is_refused_and_no_file_is_written(tmp_path, capsys, content, words):
    root = tmp_path / "birds"
    root.mkdir()
    if content == "file":
        (root / "labels.csv").touch()
    for i in range(4 if content == "flat" else 0):
        put(root / f"{i}.png")
    path = root / "labels.csv" if content == "file" else root
    code, _, err = run(capsys, "data", "pack", path, "--data", tmp_path / "data")
    assert code in (1, 2) and words in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "birds.yaml").exists()


def put_sheet(root: Path, header: str, *lines: str) -> None:
    (root / "labels.csv").write_text("\n".join((header, *lines)))


UNCLEAR = {
    "one class": (["images"], None, "has one class, 'images': put the images of each class into a folder"),
    "parallel trees": (["color/a", "color/b", "grey/a", "grey/b"], None, "but the same folders, 'a', 'b', so it is"),
    "splits in classes": (["a/train", "a/test", "b/train", "b/test"], None, "into folders of splits, such as train/a"),
    "splits alone": (["train", "test"], None, "'test', 'train', which are names of splits"),
    "images and masks": (["images", "masks"], None, "'images', 'masks', which are names of splits or kinds of files"),
    "splits of images": (["test_images", "train_images"], None, "'train_images', which are names of splits"),
    "a table without rows": (["images"], ("path,label",), "'images' (left out: 1 file: 'labels.csv' (1 csv))"),
    "a test split without classes": (["train/a", "train/b", "test"], None, "test holds no folders"),
    "a table of unknown columns": (
        ["one", "two"], ("x,y,z", "one/00.png,a,b"), "labels.csv (columns: 'x', 'y', 'z'; path (or filename), label"
    ),
    "a table of images elsewhere": (
        ["one", "two"], ("Path,Label", "three/0.png,a", "three/1.png,b"), "in several folders: 'three/0.png'"
    ),
    "a table of one class": (["images"], ("path,label", "images/00.png,a", "images/01.png,a"), "has one class, 'a'"),
    "HEIC alone": ([], None, "2 heic); HEIC is not read: convert it to JPEG"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_layout_with_evidence_against_it_is_refused(tmp_path, capsys, kind):
    folders, table, words = UNCLEAR[kind]
    put_classes(tmp_path / "birds", folders, each=2)
    if table:
        put_sheet(tmp_path / "birds", *table)
    for i in range(0 if folders else 2):
        put(tmp_path / "birds" / f"{i}.heic")
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    assert code == 1 and words in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "birds.yaml").exists()


def test_images_that_a_table_does_not_list_are_counted(tmp_path, capsys):
    put_classes(tmp_path / "birds", ["images"], each=6)
    put_sheet(tmp_path / "birds", "path,label", *(f"images/{i:02d}.png,{'ab'[i % 2]}" for i in range(4)))
    err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[2]
    assert "without 2 images that it does not list ('images/04.png', 'images/05.png')" in err


def put_tables(root: Path, **folders: str) -> None:
    """Write a table of each name, whose images have equal names in all folders and a colour of their folder."""
    for number, (name, folder) in enumerate(folders.items()):
        for i in range(6):
            put(root / folder / f"{i}.png", (40 * number, i, 0))
        table = (root / name.replace("__", "/")).with_suffix(".csv")
        table.parent.mkdir(exist_ok=True)
        table.write_text("\n".join(["file_name,label", *(f"{i}.png,{'ab'[i % 2]}" for i in range(6))]))


@pytest.mark.parametrize(("tables", "splits"), [
    ({"train": "train", "test": "test"}, {"train": "train", "test": "test"}),
    ({"train_labels": "train_images", "dev_labels": "dev_images"}, {"train": "train_images", "test": "dev_images"}),
    ({"train__metadata": "train", "valid__metadata": "valid", "test__metadata": "test"},
     {"train": "train", "val": "valid", "test": "test"}),
])  # fmt: skip
def test_a_table_for_each_split_has_the_images_in_its_folder(tmp_path, capsys, tables, splits):
    put_tables(tmp_path / "birds", **tables)
    assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data", "--max-side", "0")[0] == 0
    assert run(capsys, "data", "pack", tmp_path / "birds.yaml", "--data", tmp_path / "data")[0] == 0
    dataset = open_dataset(tmp_path / "data", "birds")
    assert {split: {path.partition("/")[0] for path in dataset.list_images(split).paths}
            for split in dataset.manifest.splits} == {split: {folder} for split, folder in splits.items()}  # fmt: skip
    images = dataset.open_images("test")
    assert images.read(1) == (tmp_path / "birds" / images.paths[1]).read_bytes()


@pytest.mark.parametrize(("folders", "found"), [
    (("test", "train"), "birds/train"), (("masks", "images"), "birds/images"), (("crops", "photos"), ""),
])  # fmt: skip
def test_a_table_has_the_images_in_the_folder_called_like_it_or_is_not_clear(tmp_path, capsys, folders, found):
    put_tables(tmp_path / "birds", **{f"x{i}": folder for i, folder in enumerate(folders)})
    (tmp_path / "birds/x0.csv").rename(tmp_path / f"birds/{'train' if 'train' in folders else 'labels'}.csv")
    (tmp_path / "birds/x1.csv").unlink()
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    if found:
        assert code == 0 and yaml.safe_load((tmp_path / "birds.yaml").read_text())["images"] == found
    else:
        assert code == 1 and "are not there, or in several folders: '0.png'" in err


def test_several_tables_that_name_no_splits_or_the_same_images_are_refused(tmp_path, capsys):
    put_tables(tmp_path / "birds", first="images", second="images")
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    assert code == 1 and "holds several tables (first.csv, second.csv): join them" in err
    put_tables(tmp_path / "finches", train="images", test="images")
    code, _, err = run(capsys, "data", "pack", tmp_path / "finches", "--data", tmp_path / "data")
    assert code == 1 and "finches/train.csv lists 'images/0.png'" in err


def test_a_table_of_a_split_may_divide_it_further_also_on_a_disk_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    root, access = tmp_path / "input/birds", os.access
    put_tables(root, train="train", test="test")
    lines = ["file_name,label,split", *(f"{i}.png,{'ab'[i % 2]},{'val' if i > 3 else 'train'}" for i in range(6))]
    (root / "train.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: "input" not in str(path) and access(path, mode))
    code, _, err = run(capsys, "data", "pack", root, "--data", tmp_path / "data")
    assert code == 0, err
    dataset = open_dataset(tmp_path / "data", "birds")
    sizes = {split: len(dataset.list_images(split).paths) for split in dataset.manifest.splits}
    assert sizes == {"train": 4, "val": 2, "test": 6}


@pytest.mark.parametrize(("name", "column", "cells"), [
    ("'fold'", "fold", (0, 1)),
    ("'Usage'", "Usage", ("Training", "PublicTest")),
    ("'path'", "width", (4, 4)),
    ("'train_test_split.txt'", "", ()),
])  # fmt: skip
def test_what_may_say_a_split_and_is_not_read_is_named(tmp_path, capsys, name, column, cells):
    root = tmp_path / "birds"
    folders = ["train", "test"] if name == "'path'" else ["emu", "ara"]
    put_classes(root, folders, each=6)
    lines = (f"{folders[i % 2]}/{i:02d}.png,{'ab'[i // 2 % 2]},{cells[i % 2]}" for i in range(6) if cells)
    if column:
        put_sheet(root, f"path,label,{column}", *lines)
    else:
        (root / name.strip("'")).write_text("1 0\n")
    code, _, err = run(capsys, "data", "pack", root, "--data", tmp_path / "data", "--workers", "1")
    assert code == 0 and f"# Note: {name} may say which images are for training, and the split does not" in err
    assert "split at random" in (tmp_path / "birds.yaml").read_text()


def test_a_table_whose_labels_need_names_leaves_a_file_to_edit(tmp_path, capsys):
    put_classes(tmp_path / "birds", ["images"], each=4)
    put_sheet(tmp_path / "birds", "image,label", *(f"images/{i:02d}.png,{i % 2}.0" for i in range(4)))
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    assert code == 1 and "labels are numbers without names: list them under classes" in err
    file = tmp_path / "birds.yaml"
    file.write_text(file.read_text() + "classes: [ara, emu]\n")
    assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[0] == 0


def test_classes_may_be_called_like_splits_and_predictions_label_nothing(tmp_path, capsys):
    put_classes(tmp_path / "things", ["train", "test", "val", "tram"], each=4)
    put_sheet(tmp_path / "things", "class,count", "train,4", "tram,4")
    (tmp_path / "things/codes.csv").write_text("id,label\ntrain,1\ntram,2\n")
    (tmp_path / "things/predictions.csv").write_text("path,class,label,probability\ntram/00.png,train,train,0.9\n")
    assert run(capsys, "data", "pack", tmp_path / "things", "--data", tmp_path / "data")[0] == 0
    assert open_dataset(tmp_path / "data", "things").classnames == ("test", "train", "tram", "val")


def put_photograph(file: Path, size: tuple[int, int], orientation: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    left_is_red = np.zeros((size[1], size[0], 3), np.uint8)
    left_is_red[:, : size[0] // 2, 0] = 250
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(left_is_red).save(file, exif=exif)


def test_photographs_of_a_folder_are_stored_with_512_pixels_by_default(tmp_path, capsys):
    for name, number in itertools.product(("finch", "parrot"), range(4)):
        put_photograph(tmp_path / f"birds/{name}/{number}.jpg", (1200, 900), 1)
    assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[0] == 0
    dataset = open_dataset(tmp_path / "data", "birds")
    assert "at most 512 pixels on the short side" in dataset.manifest.source
    assert min(dataset.open_images("train").image(0).size) == 512


def test_large_photographs_of_a_folder_are_stored_smaller_and_upright(tmp_path, capsys):
    """Orientation 6: the left half of what the sensor read is the upper half of the photograph."""
    for name, number in itertools.product(("finch", "parrot"), range(4)):
        put_photograph(tmp_path / f"birds/{name}/{number}.jpg", (1200, 900), 6)
        put_photograph(tmp_path / f"birds/{name}/{number}.png", (800, 600), 1)
        put_photograph(tmp_path / f"birds/{name}/small-{number}.jpg", (64, 48), 6)
    assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data", "--max-side", "300")[0] == 0
    dataset = open_dataset(tmp_path / "data", "birds")
    assert "at most 300 pixels on the short side" in dataset.manifest.source
    images = dataset.open_images("train")
    for i, path in enumerate(images.paths):
        data = images.read(i)
        pixels = np.asarray(images.decode(i, data))
        if path.endswith(".png"):
            assert pixels.shape == (300, 400, 3) and (pixels[150, 100, 0], pixels[150, 300, 0]) == (250, 0)
        elif "small" in path:
            assert data == (tmp_path / "birds" / path).read_bytes()
        else:
            assert pixels.shape == (400, 300, 3) and pixels[100, 150, 0] > 240 and pixels[300, 150, 0] < 10
    written = read_files(dataset.folder)
    assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[0] == 0
    assert read_files(dataset.folder) == written
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data", "--max-side", "0")
    assert code == 2 and "change max_side in it" in err
    for name in (tmp_path / "birds.yaml", "digits"):
        code, _, err = run(capsys, "data", "pack", name, "--data", tmp_path / "data", "--max-side", "8")
        assert code == 2 and f"not for '{name}'" in err
