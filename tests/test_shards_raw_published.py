"""The published split files, read in full: CoOp's lists to the letter, and nothing else under their names.

Images are empty files here: listing reads none of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shards.catalogue import derive_dataset, find
from shards.errors import DataError
from shards.manifest import lines_digest
from shards.raw.classnames import imagenet_wnids, published_classnames
from shards.raw.published import check_raw, raw_source
from shards.records import Source

SPLITS = Path(__file__).resolve().parents[1].parent / "shared" / "splits"
SEVEN = ("caltech101", "oxford-pets", "stanford-cars", "oxford-flowers", "dtd", "eurosat", "ucf101")
TRAINVAL = ("oxford-pets", "stanford-cars", "ucf101")


def rows_of(name: str) -> dict[str, list[list]]:
    raw = find(name).raw
    assert raw
    file = SPLITS / raw.split_file
    if not file.exists():
        pytest.skip(f"{file.name} is not beside the project")
    return json.loads(file.read_text())


@pytest.fixture(scope="module", params=SEVEN)
def stubs(request, tmp_path_factory):
    """A raw root with one data set: its split file, its official lists, and an empty file for every image."""
    name = request.param
    rows, root = rows_of(name), tmp_path_factory.mktemp(name)
    raw = find(name).raw
    assert raw
    folder = root / raw.folders[0]
    images = folder / raw.images[0]
    paths = [path for split in rows.values() for path, _, _ in split]
    random.Random(0).shuffle(paths)
    for parent in {path.rpartition("/")[0] for path in paths}:
        (images / parent).mkdir(parents=True, exist_ok=True)
    for path in paths:
        os.close(os.open(f"{images}/{path}", os.O_CREAT))
    shutil.copy(SPLITS / raw.split_file, folder)
    write_official_lists(name, rows, folder)
    yield name, root
    shutil.rmtree(root)


def write_official_lists(name: str, rows: dict[str, list[list]], folder: Path) -> None:
    """What the archives of the data set bring, rebuilt from its split file."""
    from scipy.io import savemat

    parts = {"trainval": sorted([*rows["train"], *rows["val"]]), "test": rows["test"]}
    if name == "oxford-pets":
        (folder / "annotations").mkdir()
        for part, images in parts.items():
            lines = [f"{path.removesuffix('.jpg')} {label + 1} 1 1\n" for path, label, _ in images]
            (folder / "annotations" / f"{part}.txt").write_text("".join(lines))
    elif name == "stanford-cars":
        (folder / "devkit").mkdir()
        files = {"trainval": "devkit/cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}
        for part, images in parts.items():
            table = [(path.partition("/")[2], label + 1) for path, label, _ in images]
            savemat(folder / files[part], {"annotations": np.array([table], [("fname", object), ("class", object)])})
    elif name == "ucf101":
        (folder / "ucfTrainTestlist").mkdir()
        for part, images in parts.items():
            lines = [f"{classname.replace('_', '')}/{Path(path).stem}.avi 1\n" for path, _, classname in images]
            file = "trainlist01.txt" if part == "trainval" else "testlist01.txt"
            (folder / "ucfTrainTestlist" / file).write_text("".join(lines))
    elif name == "oxford-flowers":
        labels = {path: label for split in rows.values() for path, label, _ in split}
        savemat(folder / "imagelabels.mat", {"labels": np.array([[labels[path] + 1 for path in sorted(labels)]])})


def listed(source: Source, split: str) -> list[tuple[str, int, str]]:
    part = source.part(split, 0, source.counts[split])
    return [(path, label, source.classnames[label]) for path, label in zip(part.paths, part.labels, strict=True)]  # type: ignore[attr-defined]


def tree(root: Path) -> list[tuple[str, int, int]]:
    """A folder's time changes with what it holds."""
    return sorted((folder, os.stat(folder).st_mtime_ns, len(files)) for folder, _, files in os.walk(root))


def test_lists_are_those_of_the_split_file_in_their_order_and_nothing_is_written(stubs):
    name, root = stubs
    dataset, before = find(name), tree(root)
    source = raw_source(dataset, root)
    assert dataset.raw
    for split, rows in rows_of(name).items():
        assert listed(source, split) == [tuple(row) for row in rows]
        lines = ("\t".join(map(str, row)) for row in listed(source, split))
        assert lines_digest(lines) == dataset.raw.split_digests[split]
    assert dict(source.counts) == dict(dataset.counts) and source.variant == "" and source.name == name
    assert lines_digest(source.classnames) == dataset.raw.classnames_digest
    report = check_raw(dataset, root, decode=False)
    assert report.ok and report.folder and not report.fixes
    assert [(split.expected, split.present) for split in report.splits] == [
        (count, count) for count in dataset.counts.values()
    ]
    assert tree(root) == before


def test_a_random_split_has_the_published_sizes_and_keeps_an_official_test_list(stubs):
    name, root = stubs
    dataset, before, published = find(name), tree(root), rows_of(name)
    random.seed(3)
    state = random.getstate()
    source, again, other = (raw_source(derive_dataset(dataset, random_split=seed), root) for seed in (7, 7, 8))
    assert random.getstate() == state, "the draw has a stream of its own"
    assert source.name == f"{name}-split7" and source.variant == "random split, seed 7"
    assert source.classnames == published_classnames(dataset)
    everything = {split: listed(source, split) for split in published}
    for split, rows in published.items():
        assert listed(again, split) == everything[split]
        per_class = Counter(label for _, label, _ in rows)
        assert Counter(label for _, label, _ in everything[split]) == per_class
        kept = split == "test" and name in TRAINVAL
        assert (everything[split] == [tuple(row) for row in rows]) == kept
        assert (listed(other, split) == everything[split]) == kept
    union = sorted(image for split in everything.values() for image in split)
    assert union == sorted(tuple(row) for rows in published.values() for row in rows)
    assert tree(root) == before


def test_a_random_split_is_drawn_by_coops_rule_from_the_official_order(stubs):
    """The rule, written out: which images a shuffle is of, in which order, and which part of it goes where."""
    name, root = stubs
    published, draw = rows_of(name), random.Random(11)
    everything = sorted(tuple(row) for split in published.values() for row in split)
    if name in TRAINVAL:
        everything = sorted(tuple(row) for split in ("train", "val") for row in published[split])
    classes: dict[int, list[tuple]] = {}
    for row in everything:
        classes.setdefault(row[1], []).append(row)
    expected: dict[str, list[tuple]] = {"train": [], "val": [], "test": []}
    for rows in classes.values():
        draw.shuffle(rows)
        if name in TRAINVAL:
            val = round(0.2 * len(rows))
            parts = {"val": rows[:val], "train": rows[val:]}
        else:
            train, val = round(0.5 * len(rows)), round(0.5 * len(rows)) + round(0.2 * len(rows))
            parts = {"train": rows[:train], "val": rows[train:val], "test": rows[val:]}
        for split, part in parts.items():
            expected[split] += part
    if name in TRAINVAL:
        expected["test"] = [tuple(row) for row in published["test"]]
    source = raw_source(derive_dataset(find(name), random_split=11), root)
    assert {split: listed(source, split) for split in expected} == expected


def altered(name: str, tmp_path: Path, change, images_made: int | None = None) -> Path:
    """A root whose split file is the published one with a change; with all its images or with the first so many."""
    rows, raw = rows_of(name), find(name).raw
    assert raw
    change(rows)
    images = tmp_path / raw.folders[0] / raw.images[0]
    images.mkdir(parents=True)
    for path in [path for split in rows.values() for path, _, _ in split][:images_made]:
        (images / path).touch()
    (tmp_path / raw.folders[0] / raw.split_file).write_text(json.dumps(rows))
    return images


def swap(rows):
    rows["train"][3], rows["train"][4] = rows["train"][4], rows["train"][3]


def move(rows):
    rows["val"].append(rows["train"].pop())


def rename(rows):
    for split in rows.values():
        for row in split:
            row[2] = row[2].replace("_", " ")


@pytest.mark.parametrize("change", [swap, move, rename])
def test_a_private_split_under_the_official_name_is_refused(tmp_path, change):
    altered("oxford-pets", tmp_path, change, 1)
    with pytest.raises(DataError, match=r"split_zhou_OxfordPets.json is not the published split") as error:
        raw_source(find("oxford-pets"), tmp_path)
    text = str(error.value)
    assert "CoOp writes a private one under that name when it is missing" in text and "\n" not in text
    assert "--random-split" in text and "--subset" in text and "DATASETS.md" in text
    report = check_raw(find("oxford-pets"), tmp_path, decode=False)
    assert not report.ok and "not the published split" in report.problems[0]


def test_missing_images_are_counted_and_a_subset_packs_the_rest_with_the_same_labels(tmp_path):
    images = altered("oxford-pets", tmp_path, lambda rows: None)
    gone = [row[0] for split in rows_of("oxford-pets").values() for row in split][::50]
    for path in gone:
        (images / path).unlink()
    dataset = find("oxford-pets")
    with pytest.raises(
        DataError, match=r"train: 59 of 2,944 images are missing: .* and 56 more; get the rest .*--subset"
    ):
        raw_source(dataset, tmp_path)
    source = raw_source(derive_dataset(dataset, subset=True), tmp_path)
    assert source.name == "oxford-pets-subset" and source.variant == f"subset: {7349 - len(gone):,} of 7,349 images"
    for split, rows in rows_of("oxford-pets").items():
        assert listed(source, split) == [tuple(row) for row in rows if row[0] not in gone]
    assert len(source.classnames) == 37
    report = check_raw(dataset, tmp_path, decode=False)
    assert [split.expected - split.present for split in report.splits] == [59, 15, 73]


@pytest.mark.slow
def test_imagenet_in_its_full_size_is_listed_in_seconds_and_little_memory(tmp_path):
    folder = tmp_path / "imagenet"
    for split, count in (("train", 1281), ("val", 50)):
        for label, wnid in enumerate(imagenet_wnids()):
            inner = folder / "images" / split / wnid
            inner.mkdir(parents=True)
            for number in range(count + (split == "train" and label < 167)):
                os.close(os.open(f"{inner}/{wnid}_{number * 7919 % 100_003}.JPEG", os.O_CREAT))
    code = f"""
import re, time
from pathlib import Path
from shards.catalogue import find
from shards.raw.published import raw_source
start = time.process_time()
source = raw_source(find("imagenet"), Path({str(tmp_path)!r}))
assert dict(source.counts) == {{"train": 1_281_167, "test": 50_000}} and source.variant == ""
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(time.process_time() - start, int(peak[1]) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, done.stdout.split())
    assert seconds < 30 and mebibytes < 400
    shutil.rmtree(folder)
