"""Reading: what was packed comes back by position, and damage is refused by name before it can change a number."""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from toy_shards import CLASSNAMES, COUNTS, is_whole, label, pixels, toy_source

from procap.errors import UsageError, UserError
from shards.check import check_dataset
from shards.files import file_sha256
from shards.image_selection import select_training_images
from shards.loader import evaluation_batches
from shards.pack import pack_source
from shards.reader import ImageList, open_dataset
from shards.source import ImageRecord, png
from shards.transforms import EvalTransform

TRANSFORM = EvalTransform(8, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    pack_source(toy_source(per_shard=5), root)
    return root


@pytest.fixture
def root(packed, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(packed, tmp_path / "data"))


def test_labels_paths_and_pixels_come_back_in_list_order(packed):
    dataset = open_dataset(packed, "toy")
    assert dataset.classnames == CLASSNAMES
    for name, count in COUNTS.items():
        split = dataset.open_images(name)
        assert len(split) == count
        assert split.labels.dtype == np.int64 and split.labels.tolist() == [label(i) for i in range(count)]
        assert split.paths == [f"{name}/{CLASSNAMES[label(i)]}/{i}.png" for i in range(count)]
        for i in reversed(range(count)):
            assert np.array_equal(np.asarray(split.image(i)), pixels(name, i))


def test_a_subset_keeps_its_images_and_relabels(packed):
    split = open_dataset(packed, "toy").open_images("test")
    picks = [i for i in (16, 2, 9, 3, 3) if label(i) in (2, 3, 4)]
    subset = split.subset(picks, {2: 0, 3: 1, 4: 2})
    again = subset.subset([len(picks) - 1, 0])
    assert subset.labels.tolist() == [label(i) - 2 for i in picks]
    assert again.paths == [split.paths[picks[-1]], split.paths[picks[0]]]
    assert np.array_equal(np.asarray(again.image(0)), pixels("test", picks[-1]))
    assert len(split.subset([])) == 0


def colour_sum(split: ImageList, i: int) -> int:
    return int(np.asarray(split.image(i)).sum())


def test_threads_share_a_split_without_mixing_images(root):
    split = open_dataset(root, "toy").open_images("train")
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(colour_sum, [split] * 400, [i % len(split) for i in range(400)]))
    assert sums == [int(pixels("train", i % len(split)).sum()) for i in range(400)]


def member_start(file: Path, member: int) -> int:
    with tarfile.open(file) as tar:
        return tar.getmembers()[member].offset


def flip_pixel_byte(file: Path) -> None:
    with tarfile.open(file) as tar:
        place = tar.getmembers()[5].offset_data + 50
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# Of a shard with its size, only the bytes of each image that is read, or of the whole shard, show the damage.
SAME_SIZE = ("garbage of the same size", "one bit", "another shard of the same size")
DAMAGE = {
    "cut between members of a sample": (lambda file: os.truncate(file, member_start(file, 7)), "truncated"),
    "only the end mark gone": (lambda file: os.truncate(file, file.stat().st_size - 1024), "truncated"),
    "zero bytes": (lambda file: os.truncate(file, 0), "truncated"),
    "missing": (Path.unlink, "cannot be read"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\0" * 512), "altered"),
    "garbage of the same size": (lambda file: file.write_bytes(b"x" * file.stat().st_size), "altered"),
    "one bit": (flip_pixel_byte, "altered"),
    "another shard of the same size": (lambda file: shutil.copy(file.with_name("0.tar"), file), "altered"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_refused_by_name_with_counts(root, kind):
    damage, verdict = DAMAGE[kind]
    damage(root / "toy/test/1.tar")
    if kind in SAME_SIZE:
        with pytest.raises(UserError, match=r"test/1\.tar (cannot be used: |is not a readable shard)"):
            list(evaluation_batches(open_dataset(root, "toy").open_images("test"), TRANSFORM, 4))
    else:
        words = rf"'toy' test: .*test/1\.tar (is )?({verdict}).*5 images"
        with pytest.raises(UserError, match=words) as error:
            open_dataset(root, "toy").open_images("test")
        command = "procap data pack toy --force --data"
        assert "\n" not in str(error.value) and command in str(error.value)
    report = check_dataset(root, "toy")
    assert not is_whole(root, "toy")
    broken = {split.name: split for split in report if split.problems}
    assert list(broken) == ["test"] and "test/1.tar" in broken["test"].problems[0]
    assert broken["test"].readable <= broken["test"].images == 17
    assert len(broken["test"].problems) <= 5, "a report must stay readable however many images are gone"
    assert broken["test"].shards_present == (3 if kind == "missing" else 4)


def edit(file: Path, place: str, value: object) -> None:
    """Set a place such as `splits.test.count` in a manifest; None removes it."""
    content = json.loads(file.read_text())
    *parents, last = [int(part) if part.isdigit() else part for part in place.split("/")]
    inside = content
    for part in parents:
        inside = inside[part]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(("place", "value", "message"), [
    ("schema_version", 9, "schema_version = 9: "),
    ("dataset", "other", "holds the data set 'other', not 'toy'"),
    ("dataset", "\ud800", "invalid JSON"),
    ("splits", {"test": {}}, "splits.test.count: field required"),
    ("splits", {}, "splits: .* at least 1"),
    ("splits/test/count", "17", "splits.test.count = '17': "),
    ("splits/test/shards/0/sha256", "x", "sha256 = 'x': "),
    ("splits/test/shards/0/file", "/etc/passwd", "file = '/etc/passwd': "),
    ("splits/test/shards/0/file", "test/../0.tar", "is damaged"),
    ("classnames/0", "a\0b", r"class name 0 is 'a\\x00b'"),
    ("classnames/0", "a\ud800", "invalid JSON"),
    ("template", "a photo", "the template 'a photo' must hold one {} and no other brace"),
    ("templates/1", "{0.__class__}", "must hold one {}"),
])  # fmt: skip
def test_a_wrong_manifest_is_refused_in_one_line(root, place, value, message):
    edit(root / "toy/manifest.json", place, value)
    with pytest.raises(UserError, match=message) as error:
        open_dataset(root, "toy").open_images("test")
    assert "\n" not in str(error.value) and str(root / "toy") in str(error.value)
    assert not is_whole(root, "toy")


@pytest.mark.parametrize(("file", "change", "message"), [
    ("manifest.json", Path.unlink, "no shards of 'toy'"),
    ("manifest.json", lambda file: file.write_text(file.read_text()[:300]), "damaged"),
    ("manifest.json", lambda file: file.write_text("[" * 100_000), "damaged"),
    ("manifest.json", lambda file: file.write_bytes(b"\xff\xfe"), "cannot be read"),
    ("manifest.json", lambda file: file.write_text("[]"), "damaged"),
    ("test/index.npy", Path.unlink, "index.npy is not usable"),
    ("test/index.npy", lambda file: file.write_bytes(b""), "index.npy is not usable"),
    ("test/index.npy", lambda file: flip_last_byte(file), "index.npy is not usable .SHA-256 differs"),
])  # fmt: skip
def test_files_are_read_only_when_they_are_the_packed_ones(root, file, change, message):
    change(root / "toy" / file)
    with pytest.raises(UserError, match=message) as error:
        assert open_dataset(root, "toy").open_images("test").paths
    assert "\n" not in str(error.value)
    assert not is_whole(root, "toy")


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def renew_hashes(folder: Path) -> None:
    """Write the hashes and sizes of a split's files into the manifest, as someone who edits data by hand would."""
    content = json.loads((folder.parent / "manifest.json").read_text())
    entry = content["splits"][folder.name]
    entry["index_sha256"] = file_sha256(folder / "index.npy")
    entry["paths_sha256"] = file_sha256(folder / "paths.txt")
    (folder / "digests.bin").unlink(missing_ok=True)
    for shard in entry["shards"]:
        file = folder.parent / shard["file"]
        shard.update(sha256=file_sha256(file), size=file.stat().st_size)
    (folder.parent / "manifest.json").write_text(json.dumps(content))


def save(rows) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return buffer.getvalue()


DAMAGED_LISTS = {
    "an empty index": ("index.npy", lambda data: b""),
    "a cut header": ("index.npy", lambda data: data[:40]),
    "objects": ("index.npy", lambda data: save(np.array([{}, []], dtype=object))),
    "a different count": ("index.npy", lambda data: save(np.load(io.BytesIO(data))[:-1])),
    "floats": ("index.npy", lambda data: save(np.zeros(17))),
    "a label without a name": ("index.npy", lambda data: save(changed(data, "label", 99))),
    "a shard that is not there": ("index.npy", lambda data: save(changed(data, "shard", 99))),
    "paths that are not UTF-8": ("paths.txt", lambda data: data.replace(b"kite", b"k\xffte")),
    "a path too few": ("paths.txt", lambda data: data.partition(b"\n")[2]),
}


def changed(data: bytes, field: str, value: int):
    rows = np.load(io.BytesIO(data))
    rows[field][3] = value
    return rows


@pytest.mark.parametrize("kind", DAMAGED_LISTS)
def test_lists_that_were_damaged_together_with_the_manifest_are_refused_in_one_line(root, kind):
    name, change = DAMAGED_LISTS[kind]
    file = root / "toy/test" / name
    file.write_bytes(change(file.read_bytes()))
    renew_hashes(file.parent)
    with pytest.raises(UserError, match=rf"{name} is not usable .*procap data pack toy --force") as error:
        assert open_dataset(root, "toy").open_images("test").paths
    assert "\n" not in str(error.value) and not is_whole(root, "toy")


READ = ("manifest.json", "test/index.npy", "test/paths.txt", "test/1.tar", "test/digests.bin")


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("is_pipe", [True, False])
def test_pipes_and_devices_are_not_read(root, name, is_pipe):
    file = root / "toy" / name
    file.unlink()
    os.mkfifo(file) if is_pipe else file.symlink_to("/dev/zero")
    if name == "test/digests.bin":
        assert open_dataset(root, "toy").open_images("test").image(0)
        return
    assert not is_whole(root, "toy")
    with pytest.raises(UserError, match="no regular file"):
        assert open_dataset(root, "toy").open_images("test").paths


def test_an_image_that_was_exchanged_is_refused_when_it_is_read_alone(root):
    file = root / "toy/train/1.tar"
    with tarfile.open(file) as tar:
        image = tar.getmembers()[5]
    data = bytearray(file.read_bytes())
    data[image.offset_data + image.size - 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"train/1\.tar is altered .the digest of train/.*6\.png differs.*--force"):
        images = select_training_images(open_dataset(root, "toy"), 0, 1).train
        for i in range(len(images)):
            images.read(i)
    # Without digests, as in a mirror, the whole shard is compared.
    (file.parent / "digests.bin").unlink()
    images = open_dataset(root, "toy").open_images("train")
    assert images.read(0)
    with pytest.raises(UserError, match=r"train/1\.tar is altered .SHA-256 differs"):
        images.read(5)


def test_shards_and_digests_of_an_earlier_packing_are_refused(tmp_path):
    """As a copy over an older set leaves them that is interrupted, where all sizes are equal."""

    def flat(shade: int, split: str) -> Iterator[ImageRecord]:
        for i in range(COUNTS[split]):
            yield ImageRecord(f"{i}.png", i % 5, png(np.full((9, 7, 3), shade, np.uint8)).ljust(200, b"\0"))

    for name, shade in (("old", 1), ("new", 2)):
        pack_source(toy_source(partial(flat, shade)), tmp_path / name)
    for file in (tmp_path / "old/toy/train").glob("*.tar"):
        shutil.copy(file, tmp_path / "new/toy/train")
    shutil.copy(tmp_path / "old/toy/train/digests.bin", tmp_path / "new/toy/train")
    images = open_dataset(tmp_path / "new", "toy").open_images("train")
    with pytest.raises(UserError, match=r"train/0\.tar is altered .SHA-256 differs"):
        images.read(0)


@pytest.mark.parametrize(("place", "value"), [
    ("splits/test/count", 18),
    ("splits/test/shards/0/count", 4),
    ("classnames", ["left-handed teapot", "red_ball", "crane (floating)", "potter's wheel", "kite"]),
    ("classnames/4", "dragon"),
    ("splits/test/digest", "0" * 16),
])  # fmt: skip
def test_a_check_compares_counts_and_names_with_the_lists(root, place, value):
    edit(root / "toy/manifest.json", place, value)
    assert not is_whole(root, "toy")


def test_an_undecodable_image_is_refused_when_it_is_read(root):
    """A shard that was packed broken has the right hash; the image itself must speak up."""
    file = root / "toy/test/1.tar"
    data = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        image = tar.getmembers()[5]
    data[image.offset_data + 45 : image.offset_data + image.size] = b"\0" * (image.size - 45)
    file.write_bytes(data)
    renew_hashes(file.parent)
    split = open_dataset(root, "toy").open_images("test")
    split.image(5)
    with pytest.raises(UserError, match=r"'toy': .*test/1\.tar: member s0000006 .* undecodable .*image 7 of 17"):
        split.image(6)
    report = check_dataset(root, "toy")
    assert [split.readable for split in report] == [23, 21, 16]


def test_a_shard_cut_while_it_is_being_read_is_refused(root):
    split = open_dataset(root, "toy").open_images("test")
    os.truncate(root / "toy/test/1.tar", 1000)
    with pytest.raises(UserError, match=r"1\.tar was cut short while in use"):
        split.image(7)


def test_a_check_reports_a_whole_set(root):
    report = check_dataset(root, "toy")
    assert is_whole(root, "toy") and [(split.readable, split.images) for split in report] == [
        (23, 23),
        (21, 21),
        (17, 17),
    ]
    assert not is_whole(root, "nothing")


def test_a_shard_that_is_missing_is_missed_by_those_alone_who_ask_for_its_split(root):
    (root / "toy/test/0.tar").unlink()
    dataset = open_dataset(root, "toy")
    assert [len(dataset.open_images(name)) for name in ("train", "val")] == [23, 21]
    with pytest.raises(UserError, match=r"'toy' test: .*test/0\.tar cannot be read \(No such file .*; 5 images\)"):
        dataset.open_images("test")
    report = check_dataset(root, "toy")
    assert [split.readable for split in report[:2]] == [23, 21] and not is_whole(root, "toy")
    os.truncate(root / "toy/train/1.tar", 1000)
    with pytest.raises(UserError, match=r"'toy' train: .*train/1\.tar is truncated"):
        dataset.open_images("train")


def test_an_unknown_split_names_those_there_are(packed):
    with pytest.raises(UsageError, match="no split 'dev'; it has: train, val, test"):
        open_dataset(packed, "toy").open_images("dev")
