"""Own data: a folder is packed without a YAML file, and few classes are reported before anything is trained."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml
from command_line import run
from own_images import CLASSES, put, put_classes

from benchmarks.cli import main
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import load_suite
from shards.raw.user_dataset import user_source
from shards.reader import open_dataset


def put_dirt(images: Path) -> None:
    """Put files of operating systems, notes, a hidden image, equal images and broken ones among class folders."""
    for file in ("Thumbs.db", "notes.txt", "Ara/Thumbs.db", "Ara/notes.txt", ".DS_Store", "Ara/._00.png"):
        (images / file).write_bytes(b"x")
    put(images / "loose.png")
    for name in ("bee_eater/copy.png", "Ara/copy.png"):
        (images / name).write_bytes((images / "Ara" / "00.png").read_bytes())


def test_a_folder_without_yaml_file_is_packed_and_everything_left_out_is_counted(tmp_path, capsys):
    images, at = tmp_path / "My Birds", ("--data", tmp_path / "data", "--workers", "1")
    put_classes(images)
    put_dirt(images)
    code, out, err = run(capsys, "data", "pack", images, "--dry-run", *at)
    assert code == 0 and "my-birds" in out and "22/8/12" in out and not (tmp_path / "My Birds.yaml").exists()
    assert f"images were not opened; to check them too: procap data check '{images}'" in err
    code, out, err = run(capsys, "data", "pack", images, *at)
    assert code == 0, err
    assert re.search(r"Zebra finch +5 +2 +3\n", out) and re.search(r"my-birds +4 +42", out)
    for words in (
        "left out: 4 files that are no images ('Ara/Thumbs.db', 'Ara/notes.txt', 'Thumbs.db' and 1 more)",
        "left out: 1 hidden image ('Ara/._00.png')",
        "left out: 1 image beside the class folders ('loose.png')",
        "1 image has copies of another class: ",
    ):
        assert f"procap: note: {words}" in err
    written = tmp_path / "My Birds.yaml"
    assert open_dataset(tmp_path / "data", "my-birds").manifest.source == user_source(written).origin
    written.write_text(written.read_text().replace("a photo of a {}.", "a drawing of a {}."))
    assert run(capsys, "data", "pack", images, *at)[0] == 0, "an existing YAML file is read, not written over"
    assert open_dataset(tmp_path / "data", "my-birds").manifest.template == "a drawing of a {}."
    written.write_text(written.read_text().replace("folder: My Birds", "folder: elsewhere"))
    code, _, err = run(capsys, "data", "pack", images, *at)
    assert code == 2 and f"{written} is there already and describes other images" in err


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (
            "images/deep/{c}",
            {"folder": "birds/images/deep", "split": {"train": 0.5, "val": 0.2, "test": 0.3, "seed": 1}},
        ),
        ("raw/{c}: stray", {"folder": "birds/raw"}),
        ("{s:train,val,test}/{c}", {"folder": "birds"}),
        ("{s:Training,valid,test}/{c}", {"splits": {"train": "Training", "val": "valid", "test": "test"}}),
        ("x/{s:train,val}/{c}", {"folder": "birds/x", "splits": {"train": "train", "test": "val"}}),
        ("{c}: few", {"split": {"train": 0.5, "test": 0.5, "seed": 1}}),
        ("table", {"table": "birds/labels.csv", "images": "birds/pictures"}),
        ("table with splits", {"table": "birds/labels.csv", "images": "birds/pictures"}),
    ],
)
def test_the_layout_of_a_folder_is_guessed(tmp_path, capsys, layout, keys):
    root = tmp_path / "birds"
    if layout.startswith("table"):
        put_classes(root / "pictures")
        lines = [(f"{name}/{i:02d}.png", name, ("train", "test")[i % 2]) for name in CLASSES for i in range(10)]
        columns = 3 if "splits" in layout else 2
        with (root / "labels.csv").open("w") as file:
            csv.writer(file).writerows([("path", "label", "split")[:columns], *(line[:columns] for line in lines)])
    else:
        place, _, more = layout.partition(": ")
        if more == "stray":
            put(root / "raw" / "stray.png")
        splits = re.findall(r"{s:(.*?)}", place)
        for split in splits[0].split(",") if splits else [""]:
            folder = re.sub(r"{s:.*?}", split, place.removesuffix("{c}"))
            put_classes(root / folder, each=2 if more == "few" else 10)
    code, _, err = run(capsys, "data", "pack", root, "--data", tmp_path / "data", "--workers", "1")
    assert code == 0, err
    written = yaml.safe_load(text := (tmp_path / "birds.yaml").read_text())
    assert all(f"\n{key}: " in text for key in written), "a line for each key"
    assert {key: written[key] for key in keys} == keys
    assert ("split" in written) == (layout not in ("table with splits",) and "{s:" not in layout)
    assert set(open_dataset(tmp_path / "data", "birds").manifest.splits) >= {"train", "test"}


@pytest.mark.parametrize("command", ["pack", "check"])
def test_all_findings_are_listed_at_once(tmp_path, capsys, command):
    images = tmp_path / "birds"
    put_classes(images)
    put_classes(images, ("coal_tit", "Zebra fnch"), each=1)
    (images / "emu").mkdir()
    (images / "Ara" / "cut.png").write_bytes((images / "Ara" / "00.png").read_bytes()[:40])
    (images / "Ara" / "page.jpg").write_text("<html>")
    code, _, err = run(
        capsys, "data", command, f"{images}/", "--workers", "1", *(("--data", tmp_path / "data") * (command == "pack"))
    )
    assert code == 1 and not (tmp_path / "data" / "birds").exists() and not (tmp_path / "birds.yaml").exists()
    assert (f"{tmp_path}/birds.yaml was not written" in err) == (command == "pack")
    for words in (
        "birds/emu holds no image: remove the folder",
        "split: class 'coal_tit' has 1 image, too few for train, val, test",
        "split: class 'Zebra fnch' has 1 image",
        "Ara/cut.png is not a readable image",
        "Ara/page.jpg is not a readable image",
    ):
        assert f"procap: problem: {words}" in err.replace(f"folder: {tmp_path}/", "")
    assert "note: class 'Zebra fnch' (1) may be a misspelling of 'Zebra finch' (10 images)" in err
    assert re.search("note: classes 'coal.tit' and 'coal.tit' differ in case, blanks or dashes alone", err)
    assert "classes are unequal: 1 (" in err and "2 classes have 1 image" in err


def test_equal_images_in_train_and_test_are_a_warning_with_their_number(tmp_path, capsys, monkeypatch):
    for split in ("train", "test"):
        put_classes(tmp_path / "birds" / split, each=2)
    put(tmp_path / "birds" / "test" / "Ara" / "02.png", (77, 7, 7))
    monkeypatch.chdir(tmp_path)
    for command in ("pack", "check"):  # The folder is checked also once it is packed.
        code, _, err = run(capsys, "data", command, "./birds", "--data", tmp_path / "data", "--workers", "1")
        assert code == 0, err
        assert "warning: 8 test images are in train too, byte for byte (test/Ara/00.png = train/Ara/00.png" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("flat", "holds 4 images and no class folders: put each class into a folder of its own, or add a table"),
        ("columns", "labels.csv begins with 'filename,class': its columns must be called path,label"),
        ("places", "holds class folders in several places: pack one of birds/north, birds/south"),
        ("empty", "holds no images: it needs a folder of images per class"),
        ("flags", "leave out the other flags"),
    ],
)
def test_a_folder_whose_layout_is_not_clear_is_refused_and_no_file_is_written(tmp_path, capsys, content, words):
    root, more = tmp_path / "birds", ["--resize", "64"] if content == "flags" else []
    root.mkdir()
    if content == "places":
        put_classes(root / "north", each=2)
        put_classes(root / "south", each=2)
    for i in range(4 if content in ("flat", "columns") else 0):
        put(root / f"{i}.png")
    if content == "columns":
        (root / "labels.csv").write_text("filename,class\n0.png,a\n")
    code, _, err = run(capsys, "data", "pack", root, "--data", tmp_path / "data", *more)
    assert code in (1, 2) and words in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "birds.yaml").exists()


@pytest.fixture(scope="module")
def one_class(tmp_path_factory) -> Path:
    """A data root with own sets of one, three and four classes, and one with test images only."""
    root = tmp_path_factory.mktemp("own")
    for name, count in (("solo", 1), ("trio", 3), ("quartet", 4)):
        put_classes(root / name, CLASSES[:count], each=6)
        assert main(["data", "pack", str(root / name), "--data", str(root / "data"), "--workers", "1"]) == 0
    return root / "data"


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (
            "train --methods coop --datasets solo --classes all",
            2,
            "'solo' has one class ('Zebra finch'): there is nothing",
        ),
        (
            "train --methods coop --datasets solo",
            2,
            "'solo' has one class ('Zebra finch'): there is nothing to tell apart",
        ),
        ("bench base-to-novel --datasets trio", 2, "base-to-novel cannot run: 'trio' has 3 classes, of which novel"),
        ("bench cross-dataset --datasets solo", 2, "'solo' has 1 class, of which all would be 1; 2 are needed"),
    ],
)
def test_too_few_classes_are_refused_with_the_reason(one_class, tmp_path, capsys, line, code, words):
    at = ["--data", str(one_class), "--results", str(tmp_path), "--tracking", "off", "--shots", "2"]
    at += ["--profile", "mini"] if "bench" in line else ["--epochs", "1"]
    assert main([*line.split(), *at]) == code
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("train.json"))


def test_zero_shot_clip_is_evaluated_without_training_on_the_classes_that_there_are(one_class, tmp_path, capsys):
    at = ["--data", str(one_class), "--results", str(tmp_path), "--tracking", "off", "--seeds", "1,2"]
    assert main(["eval", "--methods", "zeroshot", "--datasets", "trio,solo", *at]) == 0
    out, err = capsys.readouterr()
    assert "trio:base:test" in out and "solo:all:test" in out and "novel" not in out
    assert err.count("trio has 3 classes, too few for base and novel halves of two: evaluated on base") == 1
    assert err.count("solo has 1 class, too few for base and novel halves of two: evaluated on all") == 1
    assert main(["ls", "runs", "--results", str(tmp_path), "--datasets", "solo"]) == 0
    assert re.search(r"zeroshot +solo +base +16 +1 +100\.00 +- +- ", capsys.readouterr().out)
    assert main(["eval", "--methods", "zeroshot", "--datasets", "trio", *at, "--targets", "solo:novel,trio:all"]) == 3
    out, err = capsys.readouterr()
    assert out.count("trio:all:test") == 2 and err.count("solo has 1 class, and none in its novel half") == 1
    assert main(["eval", "--methods", "zeroshot", "--datasets", "trio", *at, "--targets", "solo:novel"]) == 2
    assert capsys.readouterr().err.strip().endswith("solo has 1 class, and none in its novel half")


def test_all_suites_run_on_an_own_set_alone_without_those_that_cannot(one_class, tmp_path, capsys):
    at = ["--data", str(one_class), "--results", str(tmp_path)]
    one = ["--methods", "zeroshot", "--profile", "mini", "--shots", "2", "--quick", "--dry-run"]
    assert main(["bench", "all", "--datasets", "quartet", *one, *at]) == 0
    out, err = capsys.readouterr()
    assert "quartet:base:test" in out and not re.search("shapes|tiles|digits", out)
    for name in ("cross-dataset", "domain-generalization"):
        assert f"{name} is left out: it needs other data sets than 'quartet'" in err
    always = "it always trains on 16 images per class: the largest class of 'quartet' has 3 training images\n"
    assert f"runtime is left out: {always}" in err
    assert main(["bench", "base-to-novel", "--datasets", "quartet", *one[:2], *one[4:], *at]) == 1
    assert capsys.readouterr().err.strip().endswith("; --profile mini, on generated or own data, needs none")
    assert main(["ls", "datasets", "--data", str(one_class)]) == 0
    assert re.search(r"quartet +4 +12/4/8 +yes +packed from: own folders\n", capsys.readouterr().out)


@pytest.mark.parametrize("profile", [MINI, PAPER])
@pytest.mark.parametrize(
    ("datasets", "reason"),
    [
        (("quartet",), "they are of own data sets"),
        (("tiles", "digits"), "they are of generated data sets"),
        (("quartet", "tiles"), "they are of generated and own data sets"),
        (("dtd", "quartet"), ""),
    ],
)
def test_what_compares_with_published_numbers_depends_on_the_data_set_not_the_profile(
    one_class, tmp_path, profile, datasets, reason
):
    suite = load_suite("base-to-novel")
    options = suite.options(profile, datasets=datasets, methods=("zeroshot",), data=one_class)
    results = SuiteResults.read(suite, options, tmp_path)
    if reason:
        assert results.why_incomparable == reason and not results.in_paper
    else:
        assert results.changed_sets == {"quartet": "own data"}
        assert ("the backbone is mini" in results.why_incomparable) == (profile is MINI)
