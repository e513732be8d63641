"""Data sets of one's own from a short YAML file: every layout, and one line for every mistake."""

import csv
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import yaml
from own_images import CLASSES, put, put_classes
from PIL import ExifTags, Image

from procap.errors import UserError
from shards.pack import pack_source
from shards.raw.description import Description
from shards.raw.guess import find_description_file
from shards.raw.user_dataset import user_source
from shards.reader import open_dataset
from shards.source import Source, png

HEAD = "name: my-birds\ntemplate: a photo of a {}, a type of bird.\n"
SORTED = ("Ara", "Zebra finch", "bee_eater", "coal tit")
EACH = 10
TEST = "split: test\n"
RULE = "split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}\n"


def sheet(folder: Path, text: str, head: str = HEAD) -> Path:
    file = folder / "birds.yaml"
    file.write_text(head + text, encoding="utf-8")
    return file


def rows(source: Source, split: str) -> list[tuple[str, int]]:
    return [(record.path, record.label) for record in source.make_reader(split, 0, source.counts[split])()]


def put_table(folder, lines, header, name="birds.csv", delimiter=","):
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *lines])


def test_class_folders_become_labels_sorted_by_code_point_and_are_split_by_the_rule(tmp_path, monkeypatch):
    put_classes(tmp_path / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    assert user_source(sheet(tmp_path / "elsewhere", "folder: ~/images\n" + RULE)).classnames == SORTED
    source = user_source(sheet(tmp_path, "folder: images\n" + RULE))
    assert (source.name, source.classnames) == ("my-birds", SORTED)
    assert source.templates == ("a photo of a {}, a type of bird",)
    more = user_source(sheet(tmp_path, "folder: images\ntemplates: ['a {}.', 'a drawn {}']\n" + RULE))
    assert more.templates == ("a {}", "a drawn {}"), "full stops are dropped, as from the template"
    assert dict(source.counts) == {"train": 20, "val": 8, "test": 12}
    assert source.total_bytes == sum(file.stat().st_size for file in (tmp_path / "images").rglob("*.png"))
    split_rows = {split: rows(source, split) for split in source.counts}
    everything = [row for part in split_rows.values() for row in part]
    assert sorted(path for path, _ in everything) == sorted(f"{c}/{i:02d}.png" for c in CLASSES for i in range(EACH))
    assert all(SORTED[label] == path.split("/")[0] for path, label in everything)
    for split, each in (("train", 5), ("val", 2), ("test", 3)):
        assert [label for _, label in split_rows[split]] == [label for label in range(4) for _ in range(each)]
    assert next(source.make_reader("train", 3, 7)()).path == split_rows["train"][3][0]


def test_a_split_is_a_function_of_its_seed_and_of_the_names(tmp_path):
    for root in ("one", "other"):
        put_classes(tmp_path / root / "images", CLASSES if root == "one" else CLASSES[::-1])
    first, same, other = (
        user_source(sheet(tmp_path / root, "folder: images\n" + RULE.replace("1}", f"{seed}}}")))
        for root, seed in (("one", 1), ("other", 1), ("one", 2))
    )
    assert rows(first, "train") == rows(same, "train") != rows(other, "train")
    assert dict(first.counts) == dict(other.counts) and first.origin != other.origin


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


@pytest.mark.parametrize(("name", "delimiter", "header"), [
    ("birds.csv", ",", ("path", " Label ", "SPLIT")),
    ("birds.csv", ";", ("filename", "class", "split")),
    ("birds.tsv", "\t", ("path", "label", "split")),
    ("birds.csv", ",", ("path", "label", "subset")),
])  # fmt: skip
def test_a_table_keeps_its_order_and_its_splits(tmp_path, name, delimiter, header):
    put_classes(tmp_path / "pictures", each=2)
    lines = [(f"{name}/{i:02d}.png", f" {name}", ("Test", "training")[i]) for i in (1, 0) for name in CLASSES]
    put_table(tmp_path, lines, header, name, delimiter)
    source = user_source(sheet(tmp_path, f"table: {name}\nimages: pictures\n"))
    assert source.classnames == SORTED
    assert rows(source, "train") == [(f"{name}/01.png", SORTED.index(name)) for name in CLASSES]


@pytest.mark.parametrize(("column", "test", "train"), [
    ("is_train", "0", "1"),
    ("is_training_image", "0.0", "1.0"),
    ("is_test", "True", "False"),
    ("is_valid", "true", "false"),
    ("subset", "val", "train"),
    ("split", "dev", "train"),
])  # fmt: skip
def test_a_table_can_say_its_split_as_public_tables_do(tmp_path, column, test, train):
    put_classes(tmp_path / "pictures", each=2)
    lines = [(f"{name}/{i:02d}.png", name, (test, train)[i]) for i in (0, 1) for name in CLASSES]
    put_table(tmp_path, lines, ("path", "label", column))
    source = user_source(sheet(tmp_path, "table: birds.csv\nimages: pictures\n"))
    for split, i in (("test", 0), ("train", 1)):
        assert rows(source, split) == [(f"{name}/{i:02d}.png", SORTED.index(name)) for name in CLASSES]


def test_groups_of_classes_are_not_taken_for_the_names_of_their_numbers(tmp_path):
    for i in range(8):
        put(tmp_path / f"{i}.png")
    put_table(tmp_path, [(f"{i}.png", i % 4, ("dog", "cat")[i % 2]) for i in range(8)], ("path", "label", "species"))
    source = user_source(sheet(tmp_path, "table: birds.csv\nsplit: test\nclasses: [pug, Birman, boxer, Bengal]\n"))
    assert [label for _, label in rows(source, "test")] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("names", ["[north, west, south]", "{0: north, 2: south, 1: west}"])
def test_numbers_in_a_table_are_the_labels(tmp_path, names):
    for i in range(6):
        put(tmp_path / f"{i}.png")
    put_table(tmp_path, [(f"{i}.png", (2, 0, 1)[i % 3]) for i in range(6)], ("path", "label"))
    source = user_source(sheet(tmp_path, f"table: birds.csv\nsplit: test\nclasses: {names}\n"))
    assert source.classnames == ("north", "west", "south")
    assert [label for _, label in rows(source, "test")] == [2, 0, 1, 2, 0, 1]


def test_an_image_that_is_added_or_replaced_is_packed(tmp_path):
    put_classes(tmp_path / "images")
    file = sheet(tmp_path, "folder: images\n" + RULE)
    pack_source(user_source(file), tmp_path / "data")
    put(tmp_path / "images" / "Ara" / "10.png")
    before = pack_source(user_source(file), tmp_path / "data")
    assert sum(entry.count for entry in before.splits.values()) == 41
    assert pack_source(user_source(file), tmp_path / "data") == before
    (tmp_path / "images" / "Ara" / "00.png").write_bytes(png(np.full((40, 50, 3), (9, 1, 5), np.uint8)))
    after = pack_source(user_source(file), tmp_path / "data")
    old, new = ({split: entry.digest for split, entry in one.splits.items()} for one in (before, after))
    assert new == old
    assert after.digest != before.digest


def test_own_images_are_packed_as_their_exif_orientation_says(tmp_path):
    picture = Image.fromarray(np.repeat(np.arange(0, 240, 10, dtype=np.uint8)[:, None], 8, 1)).convert("RGB")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name in ("Ara", "bee_eater"):
        put(tmp_path / "images" / name / "upright.png")
        picture.save(tmp_path / "images" / name / "turned.jpg", exif=exif)
    pack_source(user_source(sheet(tmp_path, "folder: images\nsplit: test\n")), tmp_path / "data")
    packed = open_dataset(tmp_path / "data", "my-birds")
    assert "EXIF orientation applied" in packed.manifest.source
    image = packed.open_images("test").image(0)
    assert image.size == (24, 8) and np.abs(np.asarray(image)[4, ::-1, 0] - np.arange(0, 240, 10)).max() <= 4


IN_FOLDERS = "folder: images\n" + RULE
MISTAKES = {
    "unknown key": ("foldr: images\n", "foldr = 'images': extra inputs"),
    "unknown key of split": ("folder: images\nsplit: {train: 0.5, tets: 0.5}\n", r"split.*(tets|test): "),
    "no source": ("classes: [a]\n", "give one of folder and table"),
    "no yaml": ("folder: [a\nb: c\n", "no YAML that can be read .*line 3"),
    "a key twice": ("folder: images\nclasses: [a]\nclasses: [b]\n", "line 5: the key 'classes' stands twice"),
    "a list as a key": ("folder: images\n? [a, b]\n: c\n", "no YAML that can be read .*line"),
    "a tag": ("folder: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    "deep nesting": ("classes: " + "[" * 5000 + "]" * 5000 + "\n", "no YAML that can be read"),
    "name of the catalogue": (
        "folder: images\n",
        "'shapes' is a name of the catalogue",
        HEAD.replace("my-birds", "shapes"),
    ),
    "name that climbs": ("folder: images\n", "small letters", HEAD.replace("my-birds", "../birds")),
    "name that is a number": ("folder: images\n", "7: input should be", HEAD.replace("my-birds", "7")),
    "no name": ("folder: images\n", ": name: field required", "template: a {}.\n"),
    "template without {}": ("folder: images\n", r"template.*one \{\}", HEAD.replace("{}", "bird")),
    "no split": ("folder: images\n", r"do not define train and test: add split: \{train: 0\.5"),
    "split of more than all": ("folder: images\nsplit: {train: 0.5, test: 0.6}\n", r"split: .*add up to 1\.1"),
    "no class folders": ("folder: images/Ara\n" + RULE, "has no class folders"),
    "unlisted class": (
        IN_FOLDERS + "classes: {emu: emu}\n",
        "classes: not listed: 'Ara', 'Zebra finch', 'bee_eater', 'coal tit'; listed without images: 'emu'$",
    ),
    "yes as a name": (IN_FOLDERS + "classes: {Ara: yes, emu: no}\n", "classes: a name is read as True: .* in quotes"),
    "no as a label": (IN_FOLDERS + "classes: {no: nothing}\n", "classes: a name is read as False: .* in quotes"),
    "names that are numbers": (IN_FOLDERS + "classes: [1, 2]\n", "classes: a name is read as 1: .* in quotes"),
    "class without images": (
        IN_FOLDERS + "classes: [Ara, Zebra finch, bee_eater, coal tit, emu]\n",
        "classes: listed without images: 'emu'$",
    ),
    "two folders of one name": (
        IN_FOLDERS + "classes: {Ara: bird, Zebra finch: bird, bee_eater: b, coal tit: c}\n",
        "two labels are called 'bird': give the images of one class one label",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_the_yaml_file_is_named_in_one_line(tmp_path, kind):
    put_classes(tmp_path / "images", each=4)
    text, words, head = (*MISTAKES[kind], HEAD)[:3]
    file = sheet(tmp_path, text, head)
    with pytest.raises(UserError, match=words) as caught:
        user_source(file)
    message = str(caught.value)
    assert message.startswith(str(file)) and "\n" not in message and len(message) < 700


def as_lines(pairs, separator=",", header=()):
    return "".join(f"{separator.join(map(str, row))}\n" for row in [*filter(None, [header]), *pairs])


PAIRS = [(f"pictures/{name}/{i}.png", name) for name in ("ara", "emu") for i in range(2)]
FORMATS = {
    "metadata.jsonl of the Hub": ("b.jsonl", "".join(f'{{"file_name": "{p}", "label": "{n}"}}\n' for p, n in PAIRS)),
    "UTF-16 with tabs, as Excel writes it": ("b.csv", as_lines(PAIRS, "\t", ("path", "label")).encode("utf-16")),
    "semicolons and a byte order mark": ("b.csv", as_lines(PAIRS, ";", ("Image", "Species")).encode("utf-8-sig")),
    "without a header": ("b.csv", as_lines(PAIRS)),
    "ids without endings": ("b.csv", as_lines([(p[:-4], n) for p, n in PAIRS], header=("id", "breed"))),
    "a list separated by blanks": ("labels.txt", as_lines(PAIRS, " ")),
    "unknown names of two columns": ("b.csv", as_lines(PAIRS, header=("picture", "kind"))),
    "one column per class": (
        "b.csv", as_lines([(p, float(n == "ara"), float(n == "emu")) for p, n in PAIRS], ",", ("image", "ara", "emu")),
    ),
    "absolute paths of another machine": (
        "b.csv", as_lines([(f"/home/ann/data/{p}", n) for p, n in PAIRS], header=("path", "label")),
    ),
    "paths from further outside": ("b.csv", as_lines([(f"root/{p}", n) for p, n in PAIRS], header=("path", "label"))),
    "more columns and row numbers": (
        "b.csv",
        as_lines(
            [(i, 4, p, int(n == "emu"), n) for i, (p, n) in enumerate(PAIRS)],
            header=("", "width", "path", "label", "class"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_table_is_read_as_other_programs_write_it(tmp_path, kind):
    name, content = FORMATS[kind]
    root = tmp_path / "root"
    for path, _ in PAIRS:
        put(root / path)
    (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    file, text = find_description_file(root)
    source = user_source(file, yaml.safe_dump(yaml.safe_load(text) | {"split": "test"}))
    assert source.classnames == ("ara", "emu")
    assert rows(source, "test") == [(path, ("ara", "emu").index(label)) for path, label in PAIRS]


def test_whole_numbers_with_a_point_are_numbers(tmp_path):
    for i in range(4):
        put(tmp_path / f"{i}.png")
    put_table(tmp_path, [(f"{i}.png", f"{i % 2}.0") for i in range(4)], ("path", "label"))
    file = sheet(tmp_path, f"table: birds.csv\n{TEST}")
    with pytest.raises(UserError, match="labels are numbers without names: list them under classes"):
        user_source(file)
    source = user_source(sheet(tmp_path, f"table: birds.csv\nclasses: [ara, emu]\n{TEST}"))
    assert rows(source, "test") == [(f"{i}.png", i % 2) for i in range(4)]


def test_numbers_that_differ_in_their_zeros_are_names(tmp_path):
    for i in range(4):
        put(tmp_path / f"{i}.png")
    put_table(tmp_path, [(f"{i}.png", ("7", "007")[i % 2]) for i in range(4)], ("path", "label"))
    source = user_source(sheet(tmp_path, f"table: birds.csv\n{TEST}"))
    assert [source.classnames[label] for _, label in rows(source, "test")] == ["7", "007"] * 2


def test_accents_that_are_stored_in_different_ways_are_one_class(tmp_path):
    for form, number in (("NFC", 0), ("NFD", 1)):
        put(tmp_path / "images" / unicodedata.normalize(form, "Kéa") / f"{number}.png")
    put(tmp_path / "images" / "emu" / "2.png")
    listed = f"classes: [emu, {unicodedata.normalize('NFD', 'Kéa')}]\n"
    assert user_source(sheet(tmp_path, f"folder: images\n{TEST}")).classnames == ("Kéa", "emu")
    assert user_source(sheet(tmp_path, f"folder: images\n{TEST}{listed}")).classnames == ("emu", "Kéa")


@pytest.mark.parametrize(("names", "classes"), [
    (("n01440764", "n03773504", "n04008634"), ("tench", "missile (n03773504)", "missile (n04008634)")),
    (("001.Black_footed_Albatross", "002.Emu"), ("Black_footed_Albatross", "Emu")),
    (("10_euro", "50_euro"), ("10_euro", "50_euro")),
    (("737-200", "737-300"), ("737-200", "737-300")),
])  # fmt: skip
def test_wordnet_ids_and_running_numbers_do_not_go_into_prompts(tmp_path, names, classes):
    put_classes(tmp_path / "birds", names, each=4)
    file, text = find_description_file(tmp_path / "birds")
    assert user_source(file, text).classnames == classes


def test_a_validation_split_without_a_class_is_noted(tmp_path):
    for split, names in (("train", CLASSES), ("val", CLASSES[1:]), ("test", CLASSES)):
        put_classes(tmp_path / "images" / split, names, each=1)
    source = user_source(sheet(tmp_path, "folder: images\n"))
    assert source.notes == ("val has no image of 'Zebra finch': settings chosen on it ignore such classes",)


TABLES: dict[str, tuple[str, str, str]] = {
    "missing image": ("csv", "path,label\na.png,x\ngone.png,y\n", "1 of 2 images are not in .*'gone.png'"),
    "unknown columns": ("csv", "p,q,r\na.png,x,y\nb.png,y,x\n", "columns: 'p', 'q', 'r'; path .or filename"),
    "no label": ("csv", "path,label\na.png,\nb.png,x\n", "csv: line 2.label = '': is neither"),
    "unknown split": ("csv", "path,label,split\na.png,x,train\nb.png,x,extra\n", "line 3.split = 'extra': is none of"),
    "a path out of the folder": ("csv", "path,label\n../a.png,x\n", "line 2.path = '../a.png': is not a plain path"),
    "a column too many": ("csv", "path,label\na.png,x,y\n", "line 2.more: extra inputs"),
    "numbers without names": ("csv", "path,label\na.png,0\nb.png,1\n", "labels are numbers .* list them under classes"),
    "nothing": ("csv", "path,label\n", "lists no images"),
    "an image in two splits": ("csv", "path,label,split\na.png,x,train\na.png,x,test\n", "'a.png' more than once"),
    "Latin-1": ("csv", "path,label\na.png,M\udcf6we\n", "birds.csv cannot be read .*utf-8. codec"),
    "an open quote": ("csv", 'path,label\n"a.png,x\n', "unexpected end of data"),
    "class not trained": (
        "csv",
        "path,label,split\na.png,rings,train\nb.png,x,train\nc.png,Ring,test\n",
        "class 'Ring' has no train image: add some",
    ),
    "split half said": ("csv", "path,label,split\na.png,x,test\nb.png,x,\n", "'b.png' has no split"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_mistake_in_a_table_is_named_in_one_line(tmp_path, kind):
    extension, text, words = TABLES[kind]
    for name in ("a.png", "b.png", "c.png"):
        put(tmp_path / name)
    (tmp_path / f"birds.{extension}").write_text(text, errors="surrogateescape")
    says = "split" in text
    file = sheet(tmp_path, f"table: birds.{extension}\n" + ("" if says else "split: test\n"))
    with pytest.raises(UserError, match=words) as caught:
        pack_source(user_source(file), tmp_path / "data")
    assert str(caught.value).startswith((str(file), "'my-birds' ")) and "\n" not in str(caught.value)


def test_numeric_labels_must_fit_the_listed_classes(tmp_path):
    for i in range(3):
        put(tmp_path / f"{i}.png")
    for labels, names, words in (
        ((0, 1, 2), "[a, b]", "classes: not listed: 2"),
        ((0, 1, 1), "[a, b, c]", "classes: listed without images: 2"),
        ((0, 1, 1), "{x: a, 1: b}", "classes: not listed: 0; listed without images: 'x'"),
    ):
        put_table(tmp_path, [(f"{i}.png", label) for i, label in enumerate(labels)], ("path", "label"))
        with pytest.raises(UserError, match=re.escape(words)):
            user_source(sheet(tmp_path, f"table: birds.csv\nsplit: test\nclasses: {names}\n"))


def test_a_split_given_by_the_data_and_the_file_is_refused(tmp_path):
    for split in ("train", "test"):
        put_classes(tmp_path / "images" / split, each=1)
    with pytest.raises(UserError, match="the data define their own splits"):
        user_source(sheet(tmp_path, IN_FOLDERS))
    put_classes(tmp_path / "images")
    with pytest.raises(UserError, match=r"holds train, test with classes inside and also .*'Ara'"):
        user_source(sheet(tmp_path, IN_FOLDERS))


def test_two_folders_of_one_split_are_refused(tmp_path):
    for split in ("train", "training", "test"):
        put_classes(tmp_path / "images" / split, each=1)
    with pytest.raises(UserError, match=r"holds train, test .* and also 'training': one folder for each split"):
        user_source(sheet(tmp_path, "folder: images\n"))


def test_images_at_any_depth_below_a_class_folder_belong_to_its_class(tmp_path):
    put_classes(tmp_path / "images", each=2)
    put(tmp_path / "images" / "Ara" / "2025" / "autumn" / "1.png")
    (tmp_path / "images" / "Ara" / "loop").symlink_to(tmp_path / "images" / "Ara")
    source = user_source(sheet(tmp_path, "folder: images\nsplit: test\n"))
    assert source.classnames[0] == "Ara"
    assert rows(source, "test")[:3] == [("Ara/00.png", 0), ("Ara/01.png", 0), ("Ara/2025/autumn/1.png", 0)]


def test_linked_folders_are_read_once_and_links_to_folders_around_them_are_not(tmp_path):
    put_classes(tmp_path / "images", CLASSES[:2], each=2)
    put_classes(tmp_path / "disk", ["batch", "batch/more"], each=1)
    cls = tmp_path / "images" / CLASSES[0]
    for name, target in (("batch", tmp_path / "disk/batch"), ("again", tmp_path / "disk/batch"), ("up", "..")):
        (cls / name).symlink_to(target)
    (tmp_path / "disk/batch/back").symlink_to(tmp_path / "images")
    put(cls / "day/night.png")
    (cls / "other day").symlink_to("day")
    source = user_source(sheet(tmp_path, f"folder: images\n{TEST}"))
    paths = [path for path, label in rows(source, "test") if source.classnames[label] == CLASSES[0]]
    assert sorted(path.rpartition("/")[2] for path in paths) == ["00.png", "00.png", "00.png", "01.png", "night.png"]
    assert f"{CLASSES[0]}/day/night.png" in paths, "a folder has its own name, not that of a link"


def test_images_that_are_replaced_by_others_of_equal_size_are_packed_again(tmp_path):
    for name in CLASSES:
        for i in range(2):
            file = tmp_path / "images" / name / f"{i}.bmp"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (5, 4), (i, 2, 3)).save(file)
    source = user_source(sheet(tmp_path, f"folder: images\n{TEST}"))
    first = pack_source(source, tmp_path / "data")
    assert pack_source(source, tmp_path / "data") == first
    Image.new("RGB", (5, 4), (99, 2, 3)).save(tmp_path / "images" / CLASSES[0] / "0.bmp")
    again = user_source(sheet(tmp_path, f"folder: images\n{TEST}"))
    assert again.origin == source.origin and pack_source(again, tmp_path / "data").digest != first.digest


def test_the_data_page_lists_every_key_of_the_yaml_file():
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
    described = dict(re.findall(r"^\| `([a-z_.]+)` +\| (.*?) +\|$", page, re.MULTILINE))
    keys = {name: field.description for name, field in Description.model_fields.items()}
    assert {name: text for name, text in described.items() if name in keys} == keys
