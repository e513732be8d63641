"""Shards of others: every sample of a whole tar is read; what is not whole or not to be trusted is refused by name."""

import json
import os
import pickle
import random
import tarfile
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from clip_benchmark_shards import CLASSES, image, layout, member, sample, several, write_tar
from local_server import Answer, LocalServer
from toy_shards import CLASSNAMES, COUNTS, toy_source
from toy_shards import label as toy_label

from shards import remote
from shards.catalogue import CATALOGUE, derive_dataset
from shards.errors import DataError, DataUsageError, NotFound
from shards.pack import pack_source
from shards.raw.classnames import published_classnames
from shards.raw.tars import public_source, remove_downloads, tar_source, working_folder
from shards.reader import open_dataset
from shards.tar import HEADER_LIMIT


def source(location, cache=None, **changes):
    fields: dict[str, object] = {"classnames": CLASSES, "template": "a photo of {}.", "templates": ["a photo of {}"]}
    fields |= {"origin": "shards of others", "cache": cache or Path("/nonexistent")}
    return tar_source("mine", str(location), **(fields | changes))  # type: ignore[arg-type]


def records(source, split="test", start=0, stop=None):
    return list(source.part(split, start, source.counts[split] if stop is None else stop).records())


def refused(folder: Path, *words: str, **changes: object) -> str:
    with pytest.raises(DataError) as error:
        source(folder, **changes)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    return text


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_WAITS", (0.01,))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with LocalServer(layout(tmp_path / "www", {"train": (4, 3), "test": (5,)})) as running:
        yield running


def test_every_sample_comes_in_order_with_its_label(tmp_path):
    folder = layout(tmp_path, {"train": (4, 3), "test": (5, 5, 2)})
    found = source(folder)
    assert found.counts == {"train": 7, "test": 12} and found.classnames == CLASSES
    assert found.template == "a photo of {}." and found.templates == ("a photo of {}",)
    assert found.origin.startswith("shards of others, lists ")
    assert found.size == sum(len(image(i)) for i in [*range(7), *range(12)])
    expected = [(f"test/s{i:07d}.png", i % 3, image(i)) for i in range(12)]
    assert [(r.path, r.label, r.data) for r in records(found)] == expected
    for start in range(13):
        for stop in range(start, 13):
            paths = [r.path for r in records(found, "test", start, stop)]
            assert paths == [path for path, *_ in expected[start:stop]]


def test_a_part_can_be_sent_and_is_stamped_by_what_it_reads(tmp_path):
    folder = layout(tmp_path, {"test": (5, 5, 2)})
    first, second = (source(folder).part("test", *slice) for slice in ((0, 6), (6, 12)))
    sent = pickle.loads(pickle.dumps(first))
    assert list(sent.records()) == list(first.records())
    assert sent.stamp() == first.stamp() == source(folder).part("test", 0, 6).stamp() != second.stamp()
    before = first.stamp()
    os.utime(folder / "test" / "0.tar", (1, 1))
    assert first.stamp() != before
    (folder / "test" / "0.tar").unlink()
    for call in (first.stamp, lambda: list(first.records())):
        with pytest.raises(DataError, match=r"0\.tar cannot be read"):
            call()


def test_tars_of_the_webdataset_library_are_read(tmp_path):
    import webdataset

    (tmp_path / "test").mkdir()
    pattern = str(tmp_path / "test" / "%d.tar")
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
        for i in range(10):
            writer.write({"__key__": f"s{i:07d}", "cls": i % 3, "webp": image(i), "json": {"caption": "x"}})
    (tmp_path / "test" / "nshards.txt").write_text("3")
    found = records(source(tmp_path))
    assert [(r.path, r.label, r.data) for r in found] == [(f"test/s{i:07d}.webp", i % 3, image(i)) for i in range(10)]


def test_our_own_shards_keep_their_paths_and_can_be_packed_again(tmp_path):
    pack_source(toy_source(), tmp_path / "a", per_shard=5)
    found = tar_source(
        "toy", str(tmp_path / "a" / "toy"), classnames=CLASSNAMES, template="a photo of a {}.",
        templates=("a photo of a {}", "an image of a {}"), origin="toy", cache=tmp_path,
    )  # fmt: skip
    assert found.counts == COUNTS
    again = pack_source(found, tmp_path / "b", per_shard=5)
    assert again.splits == open_dataset(tmp_path / "a", "toy").manifest.splits
    assert [r.label for r in records(found, "val")] == [toy_label(i) for i in range(COUNTS["val"])]


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "JPEG", "png", "webp", "gif", "bmp", "tif", "tiff"])
def test_image_members_are_known_by_extension(tmp_path, extension):
    write_tar(tmp_path / "test" / "x.tar", [member("a.cls", b"1"), member(f"a.{extension}", image(1))])
    assert [(r.path, r.label) for r in records(source(tmp_path))] == [(f"test/a.{extension.lower()}", 1)]


@pytest.mark.parametrize("members", [
    {"cls": b"2\n"}, {"cls.txt": b"2"}, {"json": b'{"label": 2}'}, {"cls": b"2", "json": b'{"label": 2, "text": "x"}'},
    {"cls": b"2", "json": b'{"label": "blue"}'}, {"cls": b"2", "txt": b"a caption", "npy": b"numbers"},
])  # fmt: skip
def test_labels_come_from_cls_or_json(tmp_path, members):
    parts = [member(f"a.{extension}", data) for extension, data in {**members, "png": image(1)}.items()]
    write_tar(tmp_path / "test" / "x.tar", parts)
    assert [r.label for r in records(source(tmp_path))] == [2]


@pytest.mark.parametrize("members, words", [
    ({"cls": b"red", "png": b"x"}, "label b'red'"),
    ({"cls": b"", "png": b"x"}, "label b''"),
    ({"cls": "²".encode(), "png": b"x"}, "label"),
    ({"cls": b"9" * 5000, "png": b"x"}, "label b'9999"),
    ({"cls": b"3", "png": b"x"}, "label 3, but labels go from 0 to 2"),
    ({"json": b'{"label": true}', "png": b"x"}, "label True"),
    ({"json": b'{"label": -1}', "png": b"x"}, "label -1"),
    ({"json": b'{"label": 99999999999999999999}', "png": b"x"}, "label 99999999999999999999"),
    ({"json": b'{"label":', "png": b"x"}, "a.json', which is no JSON"),
    ({"json": b"[" * 100_000, "png": b"x"}, "a.json', which is no JSON"),
    ({"cls": b"1", "json": b'{"label": 2}', "png": b"x"}, "two labels, 1 and 2"),
    ({"npy": b"1", "png": b"x"}, "sample 'a' without a label (only npy, png"),
    ({"cls": b"1"}, "sample 'a' without an image (only cls)"),
    ({"cls": b"1", "png": b"x", "jpg": b"x"}, "two images of sample 'a'"),
    ({"cls": b"1", "png": b"x", "PNG": b"x"}, "'a.PNG' twice"),
    ({"pyd": b"1", "png": b"x"}, "a.pyd': pickled data can run commands"),
    ({"cls": b"1", "png": b"x", "extra.pickle": b"x"}, "a.extra.pickle': pickled"),
    ({"cls": b"0" * (HEADER_LIMIT + 1), "png": b"x"}, "too many for a label"),
])  # fmt: skip
def test_samples_that_are_not_whole_are_refused_by_name(tmp_path, members, words):
    file = write_tar(tmp_path / "test" / "x.tar", [member(f"a.{end}", data) for end, data in members.items()])
    refused(tmp_path, str(file), words)


def test_interleaved_and_repeated_samples_are_refused_by_name(tmp_path):
    a, b = sample("a", 0), sample("b", 1)
    write_tar(tmp_path / "1" / "test" / "x.tar", [a[0], b[0], a[1], b[1]])
    refused(tmp_path / "1", "sample 'a' without an image", "side by side")
    write_tar(tmp_path / "2" / "test" / "x.tar", [*a, *b, *a])
    refused(tmp_path / "2", "sample 'a' for the second time")
    write_tar(tmp_path / "3" / "test" / "0.tar", [*a, *b])
    write_tar(tmp_path / "3" / "test" / "1.tar", a)
    refused(tmp_path / "3", "1.tar has sample 'a' for the second time")
    same = json.dumps({"path": "red/1.png"}).encode()
    write_tar(tmp_path / "4" / "test" / "x.tar", [*sample("a", 0, json=same), *sample("b", 1, json=same)])
    refused(tmp_path / "4", "image 'red/1.png' for the second time")


def test_folders_and_metadata_in_a_tar_are_no_samples(tmp_path):
    others = [
        member("./", type=tarfile.DIRTYPE), member("./._a.png", b"x"), member("README", b"x"),
        member("__meta__.json", b"{}"), member(".DS_Store", b"x"),
    ]  # fmt: skip
    write_tar(tmp_path / "test" / "x.tar", [*others, *sample("./train/a", 1), *sample("./b", 2)])
    assert [(r.path, r.label) for r in records(source(tmp_path))] == [("test/train/a.png", 1), ("test/b.png", 2)]


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "CHRTYPE", "BLKTYPE", "FIFOTYPE", "GNUTYPE_SPARSE"])
def test_links_and_devices_are_refused_by_name(tmp_path, kind):
    link = member("a.png", type=getattr(tarfile, kind), linkname="/etc/passwd")
    write_tar(tmp_path / "test" / "x.tar", [member("a.cls", b"1"), link])
    refused(tmp_path, "x.tar", *([] if kind == "GNUTYPE_SPARSE" else ["'a.png', which is no plain file"]))


@pytest.mark.parametrize("key", ["../escaped", "/tmp/escaped", "a/../../escaped", "a//b", "a\nb", "a\tb", "b\udcff"])
def test_names_that_lead_elsewhere_are_refused_and_do_no_harm(tmp_path, key):
    write_tar(tmp_path / "in" / "test" / "x.tar", sample(key, 1), format=tarfile.PAX_FORMAT)
    refused(tmp_path / "in", "x.tar", "no plain name")
    if "\udcff" not in key:
        side = json.dumps({"path": f"{key}.png"}).encode()
        write_tar(tmp_path / "in" / "test" / "x.tar", sample("a", 1, json=side))
        refused(tmp_path / "in", "x.tar", "no plain name")
    assert not list(tmp_path.rglob("*escaped*")) and not Path("/tmp/escaped.png").exists()


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_extended_headers_are_read(tmp_path, format):
    key = "/".join(["folder" * 5] * 3 + ["é"])
    parts = sample(key, 1)
    if format == tarfile.PAX_FORMAT:
        for info, _ in parts:
            info.pax_headers = {"mtime": "1700000000.25"}
    write_tar(tmp_path / "test" / "x.tar", parts, format=format)
    assert [(r.path, r.data) for r in records(source(tmp_path))] == [(f"test/{key}.png", image(1))]


@pytest.mark.parametrize("keep", [-1, 0, 100, 512, 1024, 1400, 2048, 3072])
def test_a_tar_that_was_cut_short_is_refused_wherever_it_was_cut(tmp_path, keep):
    file = write_tar(tmp_path / "test" / "0.tar", several(0, 2))
    whole = file.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    file.write_bytes(whole[: end if keep < 0 else keep])
    refused(tmp_path, str(file))


def test_damage_between_members_is_no_quiet_end(tmp_path):
    file = write_tar(tmp_path / "test" / "0.tar", several(0, 3))
    whole = bytearray(file.read_bytes())
    whole[4 * 512 : 5 * 512] = b"x" * 512
    file.write_bytes(whole)
    refused(tmp_path, str(file), "no member begins at byte 2048")
    file.write_bytes(write_tar(tmp_path / "a", several(0, 1)).read_bytes() * 2)
    refused(tmp_path, str(file), "more than one archive")


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info, _ = member(name, type=kind)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(size: str) -> bytes:
    record = f" size={size}\n"
    length = len(record) + len(str(len(record) + 2))
    data = f"{length}{record}".encode()
    return header("pax", len(data), tarfile.XHDTYPE) + data.ljust(512, b"\0")


def around() -> bytes:
    """A header whose negative size leads back to the members before it."""
    names = ("a.cls", "a.png", "b.cls", "b.png", "c.cls")
    members = b"".join(header(name, 1) + b"1".ljust(512, b"\0") for name in names)
    return members + header("c.png", -3584) + bytes(1024)


FORGED = {
    "huge": header("a.png", 2**62) + bytes(1024),
    "negative": header("a.png", -512) + bytes(1024),
    "around": around(),
    "huge pax": header("pax", 2**40, tarfile.XHDTYPE) + bytes(1024),
    "huge name": header("pax", 2**33, tarfile.GNUTYPE_LONGNAME) + bytes(1024),
    "pax back": pax("-99999") + header("a.png", 5) + bytes(1024),
    "pax huge": pax("9" * 40) + header("a.png", 5) + bytes(1024),
    "nested": header("x", 0, tarfile.GNUTYPE_LONGNAME) * 3000 + header("a.png", 0) + bytes(1024),
    "compressed": zlib.compress(bytes(10**6)), "empty": b"", "short": bytes(100),
    "noise": random.Random(0).randbytes(2048),
}  # fmt: skip


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED)
def test_forged_headers_are_refused_without_taking_memory(tmp_path, data):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "0.tar").write_bytes(data)
    tracemalloc.start()
    try:
        refused(tmp_path, "0.tar")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_named_tars_of_a_folder_are_found_in_natural_order(tmp_path):
    for number in range(12):
        write_tar(tmp_path / f"birds-train-{number}.tar", several(number, number + 1))
    write_tar(tmp_path / "birds_validation_000.tar", several(0, 2))
    write_tar(tmp_path / "test" / "anything.tar", several(0, 1))
    for hidden in (tmp_path / "._birds-train-0.tar", tmp_path / "test" / "._anything.tar"):
        hidden.write_bytes(b"left by a copying program")
    found = source(tmp_path, splits={"train": "train", "val": "validation", "test": "test"})
    assert found.counts == {"train": 12, "val": 2, "test": 1}
    assert [r.path for r in records(found, "train")] == [f"train/s{i:07d}.png" for i in range(12)]
    assert source(tmp_path).counts == {"train": 12, "test": 1}


def test_a_numbered_tar_that_is_missing_is_named(tmp_path):
    for number in (0, 1, 3):
        write_tar(tmp_path / "a" / f"birds-train-{number:03d}.tar", several(number, number + 1))
        write_tar(tmp_path / "b" / "train" / f"{number:05d}-of-00004.tar", several(number, number + 1))
    layout(tmp_path / "c", {"train": (1, 1, 1, 1)})
    (tmp_path / "c" / "train" / "2.tar").unlink()
    layout(tmp_path / "d", {"train": (1, 1, 1, 1)})
    (tmp_path / "d" / "train" / "nshards.txt").write_text("3\n")
    refused(tmp_path / "a", "birds-train-002.tar is missing")
    refused(tmp_path / "b", "00002-of-00004.tar is missing")
    refused(tmp_path / "c", "nshards.txt counts 4 tars, but train/2.tar is not there")
    refused(tmp_path / "d", "nshards.txt counts 3 tars, but train/3.tar is not one of them")


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1e9", "9" * 30])
def test_a_count_of_tars_that_is_none_is_refused(tmp_path, text):
    layout(tmp_path, {"test": (1,)})
    (tmp_path / "test" / "nshards.txt").write_text(text)
    refused(tmp_path, "test/nshards.txt")


def test_places_without_shards_are_one_line(tmp_path, server):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "nothing", tmp_path / "file", server.folder / "train", f"{server.url}/nothing"):
        refused(root, "train", cache=tmp_path / "cache")
    refused(server.folder, "holds no shards of that name: val/*.tar is not there", splits={"val": "val"})
    for splits in ({"test": "../www/test"}, {"test": "/etc"}, {"../x": "test"}, {"test": "a/../b"}, {"test": ".git"}):
        refused(server.folder, "is no folder or pattern", splits=splits)
    (server.folder / "dataset_type.txt").write_text("retrieval")
    refused(server.folder, "'retrieval' data set: only classification")


def test_class_names_can_come_with_the_shards(tmp_path):
    layout(tmp_path, {"test": (4,)})
    assert source(tmp_path, classnames=None).classnames == CLASSES
    (tmp_path / "classnames.txt").unlink()
    refused(tmp_path, "no classnames.txt", classnames=None)


def test_shards_behind_a_url_are_downloaded_packed_and_removed(server, tmp_path):
    cache = tmp_path / "cache"
    found = source(f"{server.url}/", cache)
    assert found.counts == {"train": 7, "test": 5}
    manifest = pack_source(found, tmp_path / "data")
    assert {split: entry.count for split, entry in manifest.splits.items()} == found.counts
    folder = working_folder(server.url, cache)
    assert len(list(folder.rglob("*.tar"))) == 3
    server.asked.clear()
    source(server.url, cache)
    assert not server.paths(".tar"), "an interrupted packing does not download again"
    remove_downloads(server.url, cache)
    assert not folder.exists()
    remove_downloads(str(server.folder), cache)
    assert (server.folder / "test" / "0.tar").exists()


def test_tars_can_be_named_by_a_pattern(server, tmp_path):
    found = source(server.url, tmp_path / "cache", splits={"train": "train/{0..1}.tar"})
    assert found.counts == {"train": 7}
    refused(server.url, "train/2.tar is not there", splits={"train": "train/{0..2}.tar"}, cache=tmp_path / "cache")
    refused(server.url, "range of at most", splits={"train": "train/{0..999999999}.tar"}, cache=tmp_path / "cache")
    refused(server.url, "range of at most", splits={"train": "train/{0..2.tar"}, cache=tmp_path / "cache")


def test_a_broken_tar_behind_a_url_is_named_by_its_url_and_not_kept(server, tmp_path):
    tar = server.folder / "test" / "0.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[:2048])
    refused(server.url, f"{server.url}/test/0.tar", cache=tmp_path / "cache")
    tar.write_bytes(whole)
    assert source(server.url, tmp_path / "cache").counts["test"] == 5


def test_a_server_that_fails_in_the_middle_is_one_line_and_goes_on_later(server, tmp_path):
    server.always["/train/1.tar"] = Answer(503)
    refused(server.url, f"{server.url}/train/1.tar", "503", cache=tmp_path / "cache")
    server.always.clear()
    server.asked.clear()
    assert source(server.url, tmp_path / "cache").counts == {"train": 7, "test": 5}
    assert "/train/0.tar" not in server.paths()


@pytest.fixture
def small_pets():
    """OxfordPets with 3 images per class, so that its shards can be made here."""
    return replace(CATALOGUE["oxford-pets"], counts={"test": 3 * 37})


def pets(root: Path, images: int = 3 * 37, classes: int = 37) -> Path:
    members = [part for i in range(images) for part in sample(f"s{i:07d}", i % classes, image(i))]
    write_tar(root / "test" / "0.tar", members)
    (root / "test" / "nshards.txt").write_text("1\n")
    write_tar(root / "train" / "0.tar", [])
    (root / "train" / "nshards.txt").write_text("1\n")
    (root / "classnames.txt").write_text("".join(f"Pet {i}\n" for i in range(37)))
    return root


def test_published_test_images_come_with_our_names_and_prompts(tmp_path, small_pets):
    found = public_source(small_pets, str(pets(tmp_path / "wds_vtab-pets")), tmp_path)
    assert found.name == "oxford-pets" and found.counts == {"test": 111}
    assert found.classnames[0] == "abyssinian" and len(found.classnames) == 37
    assert (found.template, found.templates) == (small_pets.template, small_pets.templates)
    assert found.origin == "clip-benchmark wds_vtab-pets, published shards"
    manifest = pack_source(found, tmp_path / "data")
    assert list(manifest.splits) == ["test"]


@pytest.mark.parametrize("change, words", [
    ({"images": 110}, "its test split has 110 images, OxfordPets has 111"),
    ({"classes": 36}, "no image has label 36 (1 of 37 are missing)"),
    ({"classes": 38}, "label 37, but labels go from 0 to 36"),
])  # fmt: skip
def test_other_images_than_the_published_ones_are_refused(tmp_path, small_pets, change, words):
    folder = pets(tmp_path / "x", **change)
    with pytest.raises(DataError) as error:
        public_source(small_pets, str(folder), tmp_path)
    assert words in str(error.value)
    (folder / "classnames.txt").write_text("Cat\nDog\n")
    with pytest.raises(DataError, match="it names 2 classes, OxfordPets has 37"):
        public_source(small_pets, str(folder), tmp_path)


def test_published_shards_whose_classes_stand_in_another_order_are_refused(tmp_path, small_pets):
    """The Hub's spelling is its own (Title Case, years last), so only names that we have at another place tell."""
    folder = pets(tmp_path / "wds_vtab-pets")
    names = [name.replace("_", " ").title() for name in published_classnames(small_pets)]
    (folder / "classnames.txt").write_text("\n".join([*names[:-1], "Some Other Spelling"]))
    assert public_source(small_pets, str(folder), tmp_path).counts == {"test": 111}
    names[3], names[4] = names[4], names[3]
    (folder / "classnames.txt").write_text("\n".join(names))
    with pytest.raises(DataError, match=r"another order: class 3 is .*, which OxfordPets has as class 4"):
        public_source(small_pets, str(folder), tmp_path)


@pytest.mark.parametrize("name", ["food101", "sun397", "caltech101", "dtd", "eurosat", "oxford-flowers", "ucf101"])
def test_published_shards_of_another_split_are_refused_with_the_reason(tmp_path, name):
    dataset = CATALOGUE[name]
    with pytest.raises(DataUsageError) as error:
        public_source(dataset, "https://huggingface.co/datasets/clip-benchmark/x/tree/main", tmp_path)
    public, problem = dataset.raw.public, dataset.raw.public_problem
    assert problem and problem in str(error.value) and f"procap data pack {name} --raw FOLDER" in str(error.value)
    assert not public or f"{public} cannot stand for CoOp's {dataset.title}" in str(error.value)


@pytest.mark.parametrize("location", [
    "https://huggingface.co/datasets/clip-benchmark/wds_imagenet-a/tree/main",
    "https://huggingface.co/datasets/clip-benchmark/wds_imagenet-a",
    "https://huggingface.co/datasets/clip-benchmark/wds_unheard_of/tree/main",
    "https://mirror.example.org/wds_imagenet-a",
    "/data/wds_imagenet-a/",
    "hf://datasets/clip-benchmark/wds_imagenet-a",
])  # fmt: skip
def test_shards_of_another_data_set_are_refused_by_their_name(tmp_path, location):
    with pytest.raises(DataUsageError) as error:
        public_source(CATALOGUE["imagenet-r"], location, tmp_path)
    assert "ImageNet-R, whose shards are wds_imagenet-r" in str(error.value)


def test_sets_that_are_not_published_are_refused(tmp_path):
    with pytest.raises(DataUsageError, match="no published shards"):
        public_source(CATALOGUE["shapes"], str(tmp_path), tmp_path)
    with pytest.raises(DataUsageError, match="not a published set"):
        public_source(derive_dataset(CATALOGUE["stanford-cars"], subset=True), str(tmp_path), tmp_path)


def test_a_hub_page_is_read_by_its_files(tmp_path, small_pets, monkeypatch):
    asked = []

    def read_bytes(url: str, limit: int) -> bytes:
        asked.append(url)
        raise NotFound("not there")

    monkeypatch.setattr("shards.raw.tars.read_bytes", read_bytes)
    with pytest.raises(DataError, match="holds no shards"):
        public_source(small_pets, "https://huggingface.co/datasets/clip-benchmark/wds_vtab-pets/tree/main", tmp_path)
    assert set(asked) == {
        f"https://huggingface.co/datasets/clip-benchmark/wds_vtab-pets/resolve/main/{file}"
        for file in ("classnames.txt", "dataset_type.txt", "test/nshards.txt")
    }
