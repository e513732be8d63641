"""`procap predict` and `ImageClassifier`: a trained run classifies new images as it classifies those of a test set."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.cli import main
from runner.config import Target
from runner.predict import ImageClassifier
from runner.run_folders import find_runs
from shards.errors import DataUsageError
from shards.fewshot import evaluation_split
from shards.image_files import find_images
from shards.reader import open_dataset


@pytest.fixture(scope="module")
def results(few_digits, tiny_checkpoint, tmp_path_factory) -> Path:
    """A small run of MaPLe on base classes, with its evaluation."""
    folder = tmp_path_factory.mktemp("predict") / "results"
    run = ["--method", "maple", "--datasets", "digits", "--shots", "2", "--epochs", "1", "--option", "depth=2"]
    run += ["--backbone", str(tiny_checkpoint), "--data", str(few_digits), "--tracking", "off"]
    for command in ("train", "eval"):
        assert main([command, *run, "--results", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def run(results):
    [found] = find_runs(results)
    return found


@pytest.fixture(scope="module")
def photos(few_digits, tmp_path_factory) -> Path:
    """The test images of the base classes in a folder, in their order, beside files that are no images."""
    folder = tmp_path_factory.mktemp("photos")
    selection = evaluation_split(open_dataset(few_digits, "digits"), "base")
    for i in range(len(selection.images)):
        selection.images.image(i).save(folder / f"{i:04d}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image")
    return folder


def predict(capsys, *words: object) -> list[dict[str, str]]:
    capsys.readouterr()
    assert main(["predict", *map(str, words)]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_images_of_a_folder_get_the_labels_that_the_evaluation_counted(run, photos, few_digits, capsys):
    rows = predict(capsys, run.path, photos)
    selection = evaluation_split(open_dataset(few_digits, "digits"), "base")
    truth = [selection.classnames[label].replace("_", " ") for label in selection.images.labels]
    right = [row["label"] == name for row, name in zip(rows, truth, strict=True)]
    assert right == run.evaluation(Target("digits", "base")).correct_images().tolist()
    assert [Path(row["path"]).name for row in rows] == sorted(file.name for file in photos.glob("0*.png"))


def test_shards_single_files_and_python_give_the_same_probabilities(run, photos, few_digits, capsys, tmp_path):
    files = sorted(photos.glob("0*.png"))[:3]
    classify = ImageClassifier.load(run.path)
    expected = classify([Image.open(file) for file in files])
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(3))
    rows = predict(capsys, run.path, *files, "--top", 2)
    for row, probabilities in zip(rows, expected, strict=True):
        values, classes = probabilities.topk(2)
        assert [row["label"], row["label_2"]] == [classify.classnames[i] for i in classes]
        assert [float(row["probability"]), float(row["probability_2"])] == pytest.approx(values.tolist(), abs=2e-6)
    [shard] = (few_digits / "digits" / "test").glob("*.tar")
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(run.path), str(shard), "--out", str(out), "--workers", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = list(csv.DictReader(out.open()))
    images = len(evaluation_split(open_dataset(few_digits, "digits")).images)
    assert summary["images"] == len(rows) == images and summary["classes"] == list(classify.classnames)


def test_other_class_names_can_be_chosen(run, photos, capsys):
    rows = predict(capsys, run.path, photos, "--names", "cat,dog")
    assert {row["label"] for row in rows} <= {"cat", "dog"}
    assert all(float(row["probability"]) >= 0.5 for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.jpg", b"\xff\xd8\xff and no more", "broken.jpg cannot be read: it is"),
        ("empty", None, "empty holds no images"),
        ("missing", b"", "missing does not exist"),
        ("shard.tar", b"no tar file", "shard.tar cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_is_written(run, tmp_path, capsys, name, content, message):
    path, out = tmp_path / name, tmp_path / "out.csv"
    if content is None:
        path.mkdir()
    elif content:
        path.write_bytes(content)
    assert main(["predict", str(run.path), str(path), "--out", str(out)]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_missing_paths_are_refused_before_any_image_is_read(tmp_path):
    with pytest.raises(DataUsageError, match="missing does not exist"):
        find_images([tmp_path / "missing"])


def test_every_unreadable_image_is_named_and_the_others_are_classified(run, photos, tmp_path, capsys):
    folder, out = tmp_path / "mixed", tmp_path / "out.csv"
    shutil.copytree(photos, folder)
    readable = sorted(file.name for file in folder.glob("0*.png"))
    for name in ("0000a.png", "zz.jpg"):
        (folder / name).write_bytes(b"no image")
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no tar file")
    words = ["predict", str(run.path), str(folder), str(broken), "--out", str(out), "--json"]
    assert main([*words, "--dry-run"]) == 1
    plan = capsys.readouterr()
    assert f"{len(readable) + 2} images to classify with" in plan.out and "broken.tar cannot be read" in plan.err
    assert not out.exists()
    assert main([*words, "--workers", "2"]) == 1
    printed = capsys.readouterr()
    failed = json.loads(printed.out.splitlines()[-1])["failed"]
    assert {Path(name).name for name in failed} == {"0000a.png", "zz.jpg", "broken.tar"}
    assert all(f"{name} {reason}" in printed.err for name, reason in failed.items())
    assert [Path(row["path"]).name for row in csv.DictReader(out.open())] == readable
