"""Data sets of one's own from a short YAML file: every layout, and one line for every mistake."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from clip_benchmark_shards import layout

from benchmarks.cli import main
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import suite_named
from shards.errors import DataError
from shards.pack import pack_source
from shards.raw.description import Description
from shards.raw.user_dataset import user_source
from shards.reader import open_dataset
from shards.records import Source, png

HEAD = "name: my-birds\ntemplate: a photo of a {}, a type of bird.\n"
CLASSES = ("Zebra finch", "bee_eater", "coal tit", "Ara")
SORTED = ("Ara", "Zebra finch", "bee_eater", "coal tit")
EACH = 10
RULE = "split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}\n"


def put(file: Path, colour: Sequence[int] = (1, 2, 3)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(np.full((4, 5, 3), colour, np.uint8)))


def put_classes(root: Path, classes: Sequence[str] = CLASSES, each: int = EACH) -> None:
    for c, name in enumerate(classes):
        for i in range(each):
            put(root / name / f"{i:02d}.png", (c * 60, i, 0))


def sheet(folder: Path, text: str, head: str = HEAD) -> Path:
    file = folder / "birds.yaml"
    file.write_text(head + text, encoding="utf-8")
    return file


def rows(source: Source, split: str) -> list[tuple[str, int]]:
    return [(record.path, record.label) for record in source.part(split, 0, source.counts[split]).records()]


def put_table(folder: Path, lines: Sequence[Sequence[object]], header: Sequence[str]) -> None:
    with (folder / "birds.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *lines])


def test_class_folders_become_labels_sorted_by_code_point_and_are_split_by_the_rule(tmp_path):
    put_classes(tmp_path / "images")
    source = user_source(sheet(tmp_path, "folder: images\n" + RULE))
    assert (source.name, source.classnames) == ("my-birds", SORTED)
    assert source.templates == ("a photo of a {}, a type of bird",) and source.variant == ""
    more = user_source(sheet(tmp_path, "folder: images\ntemplates: ['a {}.', 'a drawn {}']\n" + RULE))
    assert more.templates == ("a {}", "a drawn {}"), "full stops are dropped, as from the template"
    assert dict(source.counts) == {"train": 20, "val": 8, "test": 12}
    assert source.size == sum(file.stat().st_size for file in (tmp_path / "images").rglob("*.png"))
    found = {split: rows(source, split) for split in source.counts}
    everything = [row for part in found.values() for row in part]
    assert sorted(path for path, _ in everything) == sorted(f"{c}/{i:02d}.png" for c in CLASSES for i in range(EACH))
    assert all(SORTED[label] == path.split("/")[0] for path, label in everything)
    for split, each in (("train", 5), ("val", 2), ("test", 3)):
        assert [label for _, label in found[split]] == [label for label in range(4) for _ in range(each)]
    assert source.part("train", 3, 7).records().__next__().path == found["train"][3][0]


def test_a_split_is_a_function_of_its_seed_and_of_the_names(tmp_path):
    for root in ("one", "other"):
        put_classes(tmp_path / root / "images", CLASSES if root == "one" else CLASSES[::-1])
    first, same, other = (
        rows(user_source(sheet(tmp_path / root, "folder: images\n" + RULE.replace("1}", f"{seed}}}"))), "train")
        for root, seed in (("one", 1), ("other", 1), ("one", 2))
    )
    assert first == same != other and len(first) == len(other)
    assert (
        user_source(sheet(tmp_path / "one", "folder: images\n" + RULE)).origin
        != user_source(sheet(tmp_path / "one", "folder: images\n" + RULE.replace("1}", "2}"))).origin
    )


def test_a_split_without_val_and_test_images_alone(tmp_path):
    put_classes(tmp_path / "images")
    no_val = user_source(sheet(tmp_path, "folder: images\nsplit: {train: 0.7, test: 0.3}\n"))
    assert dict(no_val.counts) == {"train": 28, "test": 12}
    test = user_source(sheet(tmp_path, "folder: images\nsplit: test\n"))
    assert dict(test.counts) == {"test": 40}
    assert rows(test, "test")[:2] == [("Ara/00.png", 0), ("Ara/01.png", 0)]


def test_folders_called_train_val_and_test_are_the_splits(tmp_path):
    for split, each in (("train", 3), ("val", 1), ("test", 2)):
        put_classes(tmp_path / "images" / split, each=each)
    (tmp_path / "images" / "README.txt").write_text("about")
    (tmp_path / "images" / "train" / "Ara" / ".DS_Store").write_text("")
    (tmp_path / "images" / ".cache").mkdir()
    source = user_source(sheet(tmp_path, "folder: images\n"))
    assert dict(source.counts) == {"train": 12, "val": 4, "test": 8} and source.classnames == SORTED
    assert rows(source, "val") == [(f"val/{name}/00.png", label) for label, name in enumerate(SORTED)]


def test_classes_can_be_listed_in_another_order_or_renamed(tmp_path):
    put_classes(tmp_path / "images")
    listed = user_source(sheet(tmp_path, f"folder: images\nsplit: test\nclasses: [{', '.join(CLASSES)}]\n"))
    assert listed.classnames == CLASSES and rows(listed, "test")[0] == ("Zebra finch/00.png", 0)
    names = "{Ara: macaw, Zebra finch: zebra finch, bee_eater: bee-eater, coal tit: 'coal tit (Periparus ater)'}"
    renamed = user_source(sheet(tmp_path, f"folder: images\nsplit: test\nclasses: {names}\n"))
    assert renamed.classnames == ("macaw", "zebra finch", "bee-eater", "coal tit (Periparus ater)")


def test_a_table_keeps_its_order_and_its_splits(tmp_path):
    put_classes(tmp_path / "pictures", each=2)
    lines = [(f"{name}/{i:02d}.png", name, ("test", "train")[i]) for i in (1, 0) for name in CLASSES]
    put_table(tmp_path, lines, ("path", "label", "split"))
    source = user_source(sheet(tmp_path, "table: birds.csv\nimages: pictures\n"))
    assert source.classnames == SORTED
    assert rows(source, "train") == [(f"{name}/01.png", SORTED.index(name)) for name in CLASSES]


@pytest.mark.parametrize("names", ["[north, west, south]", "{0: north, 2: south, 1: west}"])
def test_numbers_in_a_table_are_the_labels(tmp_path, names):
    for i in range(6):
        put(tmp_path / f"{i}.png")
    put_table(tmp_path, [(f"{i}.png", (2, 0, 1)[i % 3]) for i in range(6)], ("path", "label"))
    source = user_source(sheet(tmp_path, f"table: birds.csv\nsplit: test\nclasses: {names}\n"))
    assert source.classnames == ("north", "west", "south")
    assert [label for _, label in rows(source, "test")] == [2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("form", ["objects", "lists", "coop"])
def test_json_tables_of_every_form_list_the_same_images(tmp_path, form):
    put_classes(tmp_path / "images", each=2)
    split = ("train", "test")
    plain = [(f"{name}/{i:02d}.png", name, split[i]) for i in (0, 1) for name in SORTED]
    document: object = plain
    if form == "objects":
        document = [dict(zip(("path", "label", "split"), row, strict=True)) for row in plain]
    elif form == "coop":
        document = {
            part: [(path, SORTED.index(name), name) for path, name, its in plain if its == part] for part in split
        }
    (tmp_path / "birds.json").write_text(json.dumps(document))
    source = user_source(sheet(tmp_path, "table: birds.json\nimages: images\n"))
    assert source.classnames == SORTED and dict(source.counts) == {"train": 4, "test": 4}
    assert rows(source, "test") == [(f"{name}/01.png", label) for label, name in enumerate(SORTED)]


def test_published_shards_take_the_class_names_of_the_yaml_file(tmp_path):
    layout(tmp_path / "shards", {"train": (6,), "test": (4,)})
    source = user_source(sheet(tmp_path, "shards: shards\nclasses: [dawn, day, night]\n"))
    assert dict(source.counts) == {"train": 6, "test": 4} and source.classnames == ("dawn", "day", "night")
    assert [label for _, label in rows(source, "train")] == [0, 1, 2] * 2


def test_the_command_packs_a_yaml_file_again_after_a_change(tmp_path, capsys):
    put_classes(tmp_path / "images")
    file, data = sheet(tmp_path, "folder: images\n" + RULE), str(tmp_path / "data")
    assert main(["data", "pack", str(file), "--data", data, "--workers", "1"]) == 0
    first = open_dataset(tmp_path / "data", "my-birds").manifest
    assert main(["data", "pack", str(file), "--data", data, "--workers", "1"]) == 0
    assert open_dataset(tmp_path / "data", "my-birds").manifest == first
    put(tmp_path / "images" / "Ara" / "10.png")
    assert main(["data", "pack", str(file), "--data", data, "--workers", "1"]) == 0
    assert sum(entry.count for entry in open_dataset(tmp_path / "data", "my-birds").manifest.splits.values()) == 41


def test_an_image_that_is_replaced_under_its_name_is_packed_again(tmp_path):
    put_classes(tmp_path / "images")
    file = sheet(tmp_path, "folder: images\n" + RULE)
    before = pack_source(user_source(file), tmp_path / "data")
    assert pack_source(user_source(file), tmp_path / "data") == before
    (tmp_path / "images" / "Ara" / "00.png").write_bytes(png(np.full((40, 50, 3), (9, 1, 5), np.uint8)))
    after = pack_source(user_source(file), tmp_path / "data")
    assert {split: entry.digest for split, entry in after.splits.items()} == {
        split: entry.digest for split, entry in before.splits.items()
    }
    assert after.digest != before.digest


IN_FOLDERS = "folder: images\n" + RULE
MISTAKES = {
    "unknown key": ("foldr: images\n", r"unknown key 'foldr': did you mean folder\? known: name, template"),
    "unknown key of split": ("folder: images\nsplit: {train: 0.5, tets: 0.5}\n", r"unknown key 'tets'.*test"),
    "no source": ("classes: [a]\n", "give one of folder, table and shards, not none of them"),
    "key twice": (IN_FOLDERS + "folder: x\n", "line 5: folder is given already, in line 3"),
    "no yaml": ("folder: [a\nb: c\n", "line 4: "),
    "a tag": ("folder: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    "deep nesting": ("classes: " + "[" * 5000 + "]" * 5000 + "\n", "no YAML that can be read"),
    "name of the catalogue": ("folder: images\n", "'shapes' has a meaning already", HEAD.replace("my-birds", "shapes")),
    "derived name": ("folder: images\n", "'dtd' has a meaning", HEAD.replace("my-birds", "dtd-split7")),
    "name that climbs": ("folder: images\n", "small letters", HEAD.replace("my-birds", "../birds")),
    "name that is a number": (
        "folder: images\n",
        r"name = 7: .*put it in quotes",
        HEAD.replace("my-birds", "7"),
    ),
    "no name": ("folder: images\n", ": name is missing", "template: a {}.\n"),
    "template without {}": ("folder: images\n", r"template.*one \{\}", HEAD.replace("{}", "bird")),
    "no split": ("folder: images\n", r"do not define train and test: add split: \{train: 0\.5"),
    "split of more than all": ("folder: images\nsplit: {train: 0.5, test: 0.6}\n", r"split: .*add up to 1\.1"),
    "no class folders": ("folder: images/Ara\n" + RULE, "holds no class folders"),
    "unlisted class": (IN_FOLDERS + "classes: [Ara, Zebra finch, bee_eater]\n", "'coal tit' has images"),
    "class without images": (IN_FOLDERS + "classes: [Ara, Zebra finch, bee_eater, coal tit, emu]\n", "'emu' has no im"),
    "two folders of one name": (
        IN_FOLDERS + "classes: {Ara: bird, Zebra finch: bird, bee_eater: b, coal tit: c}\n",
        "two labels are called 'bird'",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_the_yaml_file_is_named_in_one_line(tmp_path, kind):
    put_classes(tmp_path / "images", each=4)
    text, words, head = (*MISTAKES[kind], HEAD)[:3]
    file = sheet(tmp_path, text, head)
    with pytest.raises(DataError, match=words) as caught:
        user_source(file)
    message = str(caught.value)
    assert message.startswith(str(file)) and "\n" not in message and len(message) < 700


TABLES: dict[str, tuple[str, str, str]] = {
    "missing image": ("csv", "path,label\na.png,x\ngone.png,y\n", "1 of 2 images are not in .*'gone.png'"),
    "no header": ("csv", "a.png,x\nb.png,y\n", "begins with 'a.png,x', not with path,label"),
    "no label": ("csv", "path,label\na.png,\nb.png,x\n", "row 2: label ''"),
    "unknown split": ("csv", "path,label,split\na.png,x,train\nb.png,x,valid\n", "row 3: split 'valid'"),
    "a path out of the folder": ("csv", "path,label\n../a.png,x\n", "row 2: path '../a.png' is not a plain path"),
    "numbers without names": ("csv", "path,label\na.png,0\nb.png,1\n", "labels are numbers .* list them under classes"),
    "nothing": ("csv", "path,label\n", "lists no images"),
    "an image in two splits": ("csv", "path,label,split\na.png,x,train\na.png,x,test\n", "'a.png' more than once"),
    "an image of two classes": ("json", '[["a.png", "x"], ["a.png", "y"]]', "'a.png' more than once"),
    "an open quote": ("csv", 'path,label\n"a.png,x\n', "unexpected end of data"),
    "deep json": ("json", "[" * 100_000, "cannot be read"),
    "json other keys": ("json", '[{"path": "a.png", "class": "x"}]', r"entry 1 is neither \[path, label\]"),
    "json negative": ("json", '[["a.png", -1]]', "label -1"),
    "json mixed": ("json", '[["a.png", 1], ["b.png", "x"]]', "labels are text .* and numbers"),
    "coop entry": ("json", '{"test": [["a.png", "0", "x"]]}', "test entry 1 is not"),
    "coop two names": ("json", '{"test": [["a.png", 0, "x"], ["b.png", 0, "y"]]}', "'y' is its second name"),
    "coop a gap": ("json", '{"test": [["a.png", 0, "x"], ["b.png", 900000000000, "y"]]}', "no image has label 1"),
    "coop class not trained": (
        "json",
        '{"train": [["a.png", 0, "x"]], "test": [["b.png", 0, "x"], ["c.png", 1, "y"]]}',
        "class 'y' has no train image",
    ),
    "split half said": ("json", '[["a.png", "x", "test"], ["b.png", "x"]]', "'b.png' has no split"),
    "another kind of file": ("txt", "a.png x\n", "neither .csv nor .json"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_mistake_in_a_table_is_named_in_one_line(tmp_path, kind):
    extension, text, words = TABLES[kind]
    for name in ("a.png", "b.png", "c.png"):
        put(tmp_path / name)
    (tmp_path / f"birds.{extension}").write_text(text)
    says = "split" in text or (extension == "json" and ("{" in text[:1] or "test" in text))
    file = sheet(tmp_path, f"table: birds.{extension}\n" + ("" if says else "split: test\n"))
    with pytest.raises(DataError, match=words) as caught:
        pack_source(user_source(file), tmp_path / "data")
    assert str(caught.value).startswith((str(file), "'my-birds' ")) and "\n" not in str(caught.value)


def test_numeric_labels_must_fit_the_listed_classes(tmp_path):
    for i in range(3):
        put(tmp_path / f"{i}.png")
    for labels, names, words in (
        ((0, 1, 2), "[a, b]", "classes: 2 has images and is not listed"),
        ((0, 1, 1), "[a, b, c]", "classes: '2' has no images"),
        ((1, 2, 2), "{1: a, 2: b}", "no image has label 0"),
        ((0, 1, 1), "{x: a, 1: b}", "classes: 0 has images"),
    ):
        put_table(tmp_path, [(f"{i}.png", label) for i, label in enumerate(labels)], ("path", "label"))
        with pytest.raises(DataError, match=re.escape(words)):
            user_source(sheet(tmp_path, f"table: birds.csv\nsplit: test\nclasses: {names}\n"))


def test_a_split_given_by_the_data_and_the_file_is_refused(tmp_path):
    for split in ("train", "test"):
        put_classes(tmp_path / "images" / split, each=1)
    with pytest.raises(DataError, match="the data define their own splits"):
        user_source(sheet(tmp_path, IN_FOLDERS))


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("empty class", r"images/emu holds no image"),
        ("few images", r"class 'emu' has 2 images, too few for train, val, test"),
        ("stray file", r"holds 'Ara/photo\.heic', no image of a known kind"),
        ("nested folder", r"holds 'Ara/more', no image"),
        ("another part", r"holds test with classes inside and also .*'Ara'"),
        ("no test part", r"there are no test images"),
        ("class of test alone", r"class 'emu' has no train image"),
    ],
)
def test_folders_that_do_not_fit_are_named_in_one_line(tmp_path, trouble, words):
    images, text = tmp_path / "images", IN_FOLDERS
    if trouble in ("no test part", "class of test alone"):
        put_classes(images / "train", each=1)
        text = "folder: images\n"
        if trouble != "no test part":
            put_classes(images / "test", (*CLASSES, "emu"), each=1)
    else:
        put_classes(images)
    if trouble == "empty class":
        (images / "emu").mkdir()
    elif trouble == "few images":
        put_classes(images, ("emu",), each=2)
    elif trouble == "stray file":
        (images / "Ara" / "photo.heic").write_text("")
    elif trouble == "nested folder":
        put(images / "Ara" / "more" / "1.png")
    elif trouble == "another part":
        put_classes(images / "test")
    with pytest.raises(DataError, match=words) as caught:
        pack_source(user_source(sheet(tmp_path, text)), tmp_path / "data")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"- a\n- b\n", b"\xff\xfe\x00", b"just words\n", b"name: [\n", b"&a [*a]\n"])
def test_a_file_that_is_no_sheet_is_refused(tmp_path, content):
    file = tmp_path / "birds.yaml"
    file.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(file))):
        user_source(file)
    with pytest.raises(DataError, match="cannot be read"):
        user_source(tmp_path / "nowhere.yaml")


def put_dirt(images: Path) -> None:
    """Put files of operating systems, notes, a hidden image, equal images and broken ones among class folders."""
    for file in ("Thumbs.db", "notes.txt", "Ara/Thumbs.db", "Ara/notes.txt", ".DS_Store", "Ara/._00.png"):
        (images / file).write_bytes(b"x")
    put(images / "loose.png")
    for name in ("bee_eater/copy.png", "Ara/copy.png"):
        (images / name).write_bytes((images / "Ara" / "00.png").read_bytes())


def pack(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["data", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_folder_without_yaml_file_is_packed_and_everything_left_out_is_counted(tmp_path, capsys):
    images, at = tmp_path / "My Birds", ("--data", tmp_path / "data", "--workers", "1")
    put_classes(images)
    put_dirt(images)
    code, out, err = pack(capsys, "pack", images, "--dry-run", *at)
    assert code == 0 and "my-birds" in out and "22/8/12" in out and not (tmp_path / "My Birds.yaml").exists()
    code, out, err = pack(capsys, "pack", images, *at)
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
    assert pack(capsys, "pack", images, *at)[0] == 0, "an existing YAML file is read, not written over"
    assert open_dataset(tmp_path / "data", "my-birds").manifest.template == "a drawing of a {}."
    written.write_text(written.read_text().replace("folder: My Birds", "folder: elsewhere"))
    code, _, err = pack(capsys, "pack", images, *at)
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
        lines = [(f"{name}/{i:02d}.png", name, ("train", "test")[i % 2]) for name in CLASSES for i in range(EACH)]
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
            put_classes(root / folder, each=2 if more == "few" else EACH)
    code, _, err = pack(capsys, "pack", root, "--data", tmp_path / "data", "--workers", "1")
    assert code == 0, err
    written = yaml.safe_load((tmp_path / "birds.yaml").read_text())
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
    code, _, err = pack(
        capsys, command, f"{images}/", "--workers", "1", *(("--data", tmp_path / "data") * (command == "pack"))
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


def test_equal_images_in_train_and_test_are_a_warning_with_their_number(tmp_path, capsys):
    for split in ("train", "test"):
        put_classes(tmp_path / "birds" / split, each=2)
    put(tmp_path / "birds" / "test" / "Ara" / "02.png", (77, 7, 7))
    code, _, err = pack(capsys, "pack", tmp_path / "birds", "--data", tmp_path / "data", "--workers", "1")
    assert code == 0
    assert "procap: warning: 8 test images are in train too, byte for byte (test/Ara/00.png = train/Ara/00.png" in err


def test_a_nested_folder_and_wrong_labels_of_a_table_are_named(tmp_path):
    put_classes(tmp_path / "images" / "deep" / "more", each=2)
    with pytest.raises(DataError, match=r"did you mean folder: images/deep/more\?"):
        user_source(sheet(tmp_path, IN_FOLDERS))
    put_classes(tmp_path / "pictures")
    lines = [
        (f"{name}/{i:02d}.png", "coal tit" if (name, i) == ("Ara", 3) else name) for name in CLASSES for i in range(9)
    ]
    put_table(tmp_path, lines, ("path", "label"))
    notes = user_source(sheet(tmp_path, f"table: birds.csv\nimages: pictures\n{RULE}")).notes
    assert "1 label differs from the folder of the image: 'Ara/03.png is coal tit'" in notes
    assert any(
        note.startswith("left out: 4 images that the table does not list ('Zebra finch/09.png'") for note in notes
    )


def test_the_data_page_lists_every_key_of_the_yaml_file():
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    described = dict(re.findall(r"^\| `([a-z.]+)` +\| (.*?) +\|$", page, re.MULTILINE))
    keys = {name: field.description for name, field in Description.model_fields.items()}
    assert {name: text for name, text in described.items() if name in keys} == keys


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
    assert "runtime is left out: --shots 16: the largest class of 'quartet' has 3 training images" in err
    assert "give --shots 3 or fewer, or full, for the other suites: runtime always has 16" in err
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
    suite = suite_named("base-to-novel")
    options = suite.options(profile, datasets=datasets, methods=("zeroshot",), data=one_class)
    results = SuiteResults.read(suite, options, tmp_path)
    if reason:
        assert results.why_incomparable == reason and not results.in_paper
    else:
        assert results.changed_sets == {"quartet": "own data"}
        assert ("the backbone is mini" in results.why_incomparable) == (profile is MINI)


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
    code, _, err = pack(capsys, "pack", root, "--data", tmp_path / "data", *more)
    assert code in (1, 2) and words in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "birds.yaml").exists()
