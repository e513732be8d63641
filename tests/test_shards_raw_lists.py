"""Lists of raw folders are untrusted: a broken one is refused in one line that names the file and the entry."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miniature_roots import build

from shards.catalogue import derive_dataset, find
from shards.errors import DataError
from shards.names import unsafe_path
from shards.raw.classnames import published_classnames
from shards.raw.published import raw_source

BROKEN_FILE = "unchanged copy of the published file"

BROKEN_SPLITS = {
    "no JSON": "{",
    "not UTF-8": b'{"train": ["\xff"]}',
    "nested without end": "[" * 100_000,
    "a huge number": '{"train": [["a/x.jpg", ' + "9" * 5000 + ', "a"]], "val": [], "test": []}',
    "a list": "[]",
    "a split is missing": {"train": [], "test": []},
    "another split": {"train": [["a/x.jpg", 0, "a"]], "val": [], "test": [["a/y.jpg", 0, "a"]], "more": []},
    "a key twice": '{"train": [], "train": [["a/x.jpg", 0, "a"]], "val": [], "test": [["a/y.jpg", 0, "a"]]}',
    "nothing to train on": {"train": [], "val": [], "test": [["a/x.jpg", 0, "a"]]},
    "a table": {"train": {"a": 1}, "val": [], "test": []},
}
BROKEN_ROWS = {
    "two fields": ["a/x.jpg", 0],
    "a label of text": ["a/x.jpg", "0", "a"],
    "a label that is true": ["a/x.jpg", True, "a"],
    "a negative label": ["a/x.jpg", -1, "a"],
    "a label far away": ["a/x.jpg", 10**12, "b"],
    "a gap in the labels": ["a/x.jpg", 2, "b"],
    "two names for a label": ["a/x.jpg", 0, "b"],
    "the same image again": ["a/0.jpg", 0, "a"],
    "an absolute path": ["/etc/passwd", 0, "a"],
    "a path that climbs": ["a/../../x.jpg", 0, "a"],
    "an empty path": ["", 0, "a"],
    "a folder": ["a/", 0, "a"],
    "a zero byte": ["a/x\0.jpg", 0, "a"],
    "a line break": ["a/x\n.jpg", 0, "a"],
    "half a character": ["a/\ud800.jpg", 0, "a"],
    "no class name": ["a/x.jpg", 1, ""],
    "a class name with blanks": ["a/x.jpg", 1, " b"],
    "a nested path": [["a"], 0, "a"],
}


@pytest.fixture
def dtd(tmp_path) -> Path:
    build("dtd", tmp_path, per_class=4, classes=2, drawn=False)
    return tmp_path


@pytest.mark.parametrize("document", BROKEN_SPLITS.values(), ids=BROKEN_SPLITS)
def test_a_split_file_that_is_none_is_refused_in_one_line(document, dtd):
    file = dtd / "dtd" / "split_zhou_DescribableTextures.json"
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=BROKEN_FILE) as error:
        raw_source(derive_dataset(find("dtd"), subset=True), dtd)
    assert str(file) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("row", BROKEN_ROWS.values(), ids=BROKEN_ROWS)
def test_a_broken_entry_is_named_by_file_split_and_number(row, dtd):
    file = dtd / "dtd" / "split_zhou_DescribableTextures.json"
    rows = {"train": [["a/0.jpg", 0, "a"]], "val": [["a/1.jpg", 0, "a"], row], "test": [["a/2.jpg", 0, "a"]]}
    file.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=BROKEN_FILE) as error:
        raw_source(derive_dataset(find("dtd"), subset=True), dtd)
    text = str(error.value)
    assert f"{file}: val entry 2" in text or "no image has label 1" in text
    assert text.isprintable() and len(text) < 600


@settings(deadline=None)
@given(st.text(alphabet="ab./\\\0\n\r \u2028\ud800é:", max_size=12))
def test_a_path_that_is_let_through_stays_below_its_folder(path):
    if unsafe_path(path):
        return
    root = "/somewhere/raw"
    assert os.path.normpath(os.path.join(root, path)) == os.path.join(root, path)
    assert os.path.join(root, path).startswith(root + "/") and len(path.splitlines()) == 1
    path.encode()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("variants.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("variants.txt", b"707-320\n727-200\n707-320\n", "names a variant twice"),
        (
            "images_variant_test.txt",
            b"0034309 Spitfire of nowhere\n",
            "line 1: there is no class 'Spitfire of nowhere'",
        ),
        ("images_variant_test.txt", b"0034311 707-320\n", "entry 1: .* is listed twice"),
        ("images_variant_test.txt", b"../../etc/passwd 707-320\n", "entry 1: .* is not a plain path"),
        ("images_variant_test.txt", None, r"images_variant_test.txt is missing; put it there: get fgvc"),
    ],
)
def test_broken_variant_lists_are_refused(file, content, message, tmp_path):
    build("fgvc-aircraft", tmp_path, per_class=4, classes=3, drawn=False)
    target = tmp_path / "fgvc_aircraft" / file
    target.unlink()
    if content is not None:
        target.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        raw_source(derive_dataset(find("fgvc-aircraft"), subset=True), tmp_path)
    assert str(target) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("oxford-pets", "annotations/test.txt", b"Abyssinian_1 cat\n", "line 1: .* has no class number"),
        ("oxford-pets", "annotations/test.txt", b"Abyssinian_1 " + b"9" * 5000, "line 1: .* has no class number"),
        ("oxford-pets", "annotations/test.txt", b"Abyssinian_1 38 1 1\n", "entry 1: .* unknown class 38"),
        ("oxford-pets", "annotations/test.txt", b"Abyssinian_1 2 1 1\n", "entry 1: .* is listed as class 2"),
        ("oxford-pets", "annotations/test.txt", b"/etc/passwd 1 1 1\n", "entry 1: .* is not a relative path"),
        ("oxford-pets", "annotations/test.txt", b"A_1 1 1 1\nA_1 1 1 1\n", "entry 2: .* is listed twice"),
        ("oxford-pets", "annotations/trainval.txt", None, "annotations/trainval.txt is missing"),
        ("stanford-cars", "devkit/cars_train_annos.mat", b"not a MATLAB file at all", "not a readable MATLAB file"),
        ("stanford-cars", "devkit/cars_train_annos.mat", b"", "not a readable MATLAB file"),
        ("oxford-flowers", "imagelabels.mat", b"MATLAB 5.0 MAT-file" + b"\xff" * 400, "MATLAB file"),
        ("oxford-flowers", "imagelabels.mat", {"other": [1, 2]}, "holds no 'labels'"),
        ("oxford-flowers", "imagelabels.mat", {"labels": "text"}, "holds no list of numbers"),
        ("oxford-flowers", "imagelabels.mat", {"labels": [1, 103]}, "entry 2: .* unknown class 103"),
        ("sun397", "Testing_01.txt", b"/a/nowhere/sun_x.jpg\n", "line 1: there is no class 'nowhere'"),
        ("ucf101", "ucfTrainTestlist/testlist01.txt", b"Flying/v_x.avi\n", "line 1: there is no class 'Flying'"),
    ],
)
def test_broken_official_lists_are_refused_for_a_random_split(name, file, content, message, tmp_path):
    from scipy.io import savemat

    raw = find(name).raw
    assert raw
    build(name, tmp_path, per_class=4, classes=3, drawn=False)
    target = tmp_path / raw.folders[0] / file
    target.unlink()
    if isinstance(content, dict):
        savemat(target, content)
    elif content is not None:
        target.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        raw_source(derive_dataset(find(name), random_split=1), tmp_path)
    assert str(target) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["food101", "fgvc-aircraft"])
def test_lists_of_the_published_sizes_are_held_to_the_class_names(name, tmp_path):
    """Where no digest of the lists is known, their sizes and the names must do."""
    dataset = find(name)
    folder = build(name, tmp_path, per_class=4, classes=1, drawn=False)
    real = published_classnames(dataset)
    for names, refused in ((real, "images are missing"), ((*real[:-2], real[-1], real[-2]), "class names are others")):
        number = iter(range(10**6))
        rows = {
            split: [[f"{next(number):07d}.jpg", i % len(names), names[i % len(names)]] for i in range(count)]
            for split, count in dataset.counts.items()
        }
        if name == "food101":
            (folder / "split_zhou_Food101.json").write_text(json.dumps(rows))
        else:
            (folder / "variants.txt").write_text("\n".join(names))
            for split, images in rows.items():
                lines = [f"{path.removesuffix('.jpg')} {classname}" for path, _, classname in images]
                (folder / f"images_variant_{split}.txt").write_text("\n".join(lines))
        with pytest.raises(DataError, match=refused):
            raw_source(dataset, tmp_path)
