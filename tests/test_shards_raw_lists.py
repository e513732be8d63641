"""Lists of raw folders: the published ones are CoOp's to the letter, broken ones are refused in one line."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miniature_roots import build
from published_splits import split_files
from small_runs import mark_slow

from procap.errors import UserError
from shards.catalogue import find
from shards.manifest import lines_digest
from shards.names import unsafe_path
from shards.raw.published import published_classnames, published_source

BROKEN_FILE = "unchanged copy of the published file"

TRAIN, TEST = [["a/0.jpg", 0, "a"]], [["a/2.jpg", 0, "a"]]
BROKEN_SPLITS = {
    "no JSON": "{",
    "not UTF-8": b'{"train": ["\xff"]}',
    "nested without end": "[" * 100_000,
    "a huge number": '{"train": [["a/x.jpg", ' + "9" * 5000 + ', "a"]], "val": [], "test": []}',
    "a list": "[]",
    "a split is missing": {"train": [], "test": []},
    "a table": {"train": {"a": 1}, "val": [], "test": []},
    "two fields": {"train": TRAIN, "val": [["a/x.jpg", 0]], "test": TEST},
    "a label of text": {"train": TRAIN, "val": [["a/x.jpg", "0", "a"]], "test": TEST},
    "a gap in the labels": {"train": TRAIN, "val": [["a/x.jpg", 2, "b"]], "test": TEST},
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
    with pytest.raises(UserError, match=BROKEN_FILE) as error:
        published_source(find("dtd"), dtd)
    assert str(file) in str(error.value) and str(error.value).isprintable() and len(str(error.value)) < 600


@settings(deadline=None)
@given(st.text(alphabet="ab./\\\0\n\r \u2028\ud800é:", max_size=12))
def test_a_path_that_is_let_through_stays_below_its_folder(path):
    if unsafe_path(path):
        return
    root = "/somewhere/raw"
    assert os.path.normpath(os.path.join(root, path)) == os.path.join(root, path)
    assert os.path.join(root, path).startswith(root + "/") and len(path.splitlines()) == 1
    path.encode()


@pytest.mark.parametrize("name", ["food101", "fgvc-aircraft"])
def test_lists_of_the_published_sizes_are_held_to_the_class_names(name, tmp_path):
    """Where no digest of the lists is known, their sizes, the names and some lines must do."""
    dataset = find(name)
    folder = build(name, tmp_path, per_class=4, classes=1, drawn=False)
    real, known = published_classnames(dataset), dict(dataset.raw.train_lines)
    cases = [(real, known, "images are missing"), ((*real[:-2], real[-1], real[-2]), known, "not the published split")]
    # As CoOp writes one when it is missing.
    private = [(real, {}, "split_zhou_Food101.json is not the published split")] if known else []
    for names, lines, refused in cases + private:
        number = iter(range(10**6))
        rows = {
            split: [[f"{next(number):07d}.jpg", i % len(names), names[i % len(names)]] for i in range(count)]
            for split, count in dataset.counts.items()
        }
        for position, path in lines.items():
            rows["train"][position][0] = path
        if name == "food101":
            (folder / "split_zhou_Food101.json").write_text(json.dumps(rows))
        else:
            (folder / "variants.txt").write_text("\n".join(names))
            for split, images in rows.items():
                text = [f"{path.removesuffix('.jpg')} {classname}" for path, _, classname in images]
                (folder / f"images_variant_{split}.txt").write_text("\n".join(text))
        with pytest.raises(UserError, match=refused):
            published_source(dataset, tmp_path)


SEVEN = ("caltech101", "oxford-pets", "stanford-cars", "oxford-flowers", "dtd", "eurosat", "ucf101")


def rows_of(name: str) -> dict[str, list[list]]:
    return split_files()[find(name).raw.split_file]


@pytest.fixture(scope="module", params=mark_slow(SEVEN, ("caltech101", "dtd")))
def stubs(request, tmp_path_factory):
    """A raw root with one data set: its split file, and an empty file for every image."""
    name = request.param
    rows, root = rows_of(name), tmp_path_factory.mktemp(name)
    raw = find(name).raw
    folder = root / raw.folders[0]
    images = folder / raw.images[0]
    paths = [path for split in rows.values() for path, _, _ in split]
    random.Random(0).shuffle(paths)
    for parent in {path.rpartition("/")[0] for path in paths}:
        (images / parent).mkdir(parents=True, exist_ok=True)
    for path in paths:
        os.close(os.open(f"{images}/{path}", os.O_CREAT))
    (folder / raw.split_file).write_text(json.dumps(rows))
    yield name, root
    shutil.rmtree(root)


def listed(source, split):
    records = source.make_reader(split, 0, source.counts[split])()
    return [(record.path, record.label, source.classnames[record.label]) for record in records]


def tree(root: Path) -> list[tuple[str, int, int]]:
    """A folder's time changes with what it holds."""
    return sorted((folder, os.stat(folder).st_mtime_ns, len(files)) for folder, _, files in os.walk(root))


def test_lists_are_those_of_the_split_file_in_their_order_and_nothing_is_written(stubs):
    name, root = stubs
    dataset, before = find(name), tree(root)
    source = published_source(dataset, root)
    assert dataset.raw
    for split, rows in rows_of(name).items():
        assert listed(source, split) == [tuple(row) for row in rows]
        lines = ("\t".join(map(str, row)) for row in listed(source, split))
        assert lines_digest(lines) == dataset.raw.split_digests[split]
    assert dict(source.counts) == dict(dataset.counts) and source.name == name
    assert lines_digest(source.classnames) == dataset.raw.classnames_digest
    assert not source.problems and tree(root) == before


def altered(name: str, tmp_path: Path, change, images_made: int | None = None) -> Path:
    """A root whose split file is the published one with a change; with all its images or with the first so many."""
    rows, raw = rows_of(name), find(name).raw
    change(rows)
    images = tmp_path / raw.folders[0] / raw.images[0]
    images.mkdir(parents=True)
    for path in [path for split in rows.values() for path, _, _ in split][:images_made]:
        (images / path).touch()
    (tmp_path / raw.folders[0] / raw.split_file).write_text(json.dumps(rows))
    return images


def rename(rows):
    for split in rows.values():
        for row in split:
            row[2] = row[2].replace("_", " ")


@pytest.mark.parametrize("change", [
    lambda rows: rows["train"].insert(3, rows["train"].pop(4)),
    lambda rows: rows["val"].append(rows["train"].pop()),
    rename,
])  # fmt: skip
def test_a_private_split_under_the_official_name_is_refused(tmp_path, change):
    altered("oxford-pets", tmp_path, change, 1)
    with pytest.raises(UserError, match=r"split_zhou_OxfordPets.json is not the published split") as error:
        published_source(find("oxford-pets"), tmp_path)
    text = str(error.value)
    assert "CoOp writes a private one under that name when it is missing" in text and "\n" not in text
    assert "DATASETS.md" in text


def test_missing_images_are_counted(tmp_path):
    images = altered("oxford-pets", tmp_path, lambda rows: None)
    gone = [row[0] for split in rows_of("oxford-pets").values() for row in split][::50]
    for path in gone:
        (images / path).unlink()
    dataset = find("oxford-pets")
    with pytest.raises(UserError, match=r"train: 59 of 2,944 images are missing: .* and 56 more; get "):
        published_source(dataset, tmp_path)
