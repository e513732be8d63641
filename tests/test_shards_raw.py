"""Readers and checks of the fifteen raw layouts, on miniature roots with the oddities of the real sets."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from miniature_roots import FEW_OF_A_THOUSAND, WRITERS, available, build

from procap.errors import UserError
from shards.catalogue import find
from shards.images import decode
from shards.pack import pack_source
from shards.raw.published import find_folder, imagenet_wnids, published_classnames, published_source
from shards.reader import open_dataset


def listed(source):
    parts = {split: source.make_reader(split, 0, count) for split, count in source.counts.items()}
    return {split: [(record.path, record.label) for record in part()] for split, part in parts.items()}


def names(name: str) -> tuple[str, ...]:
    return published_classnames(find(name))


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """All fifteen, a few classes each; leave it as it is."""
    root = tmp_path_factory.mktemp("minis")
    for name in WRITERS:
        build(name, root, per_class=4, classes=None if find(name).num_classes == 1000 else 3)
    return root


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_is_packed_byte_by_byte_and_every_image_of_it_can_be_read(name, roots, tmp_path):
    source = available(name, roots)
    folder = find_folder(find(name), roots)
    assert folder is not None
    pack_source(replace(source, per_shard=3), tmp_path)
    dataset = open_dataset(tmp_path, name)
    for split, rows in listed(source).items():
        packed = dataset.open_images(split)
        assert list(zip(packed.paths, packed.labels.tolist(), strict=True)) == rows
        for i, (path, _) in enumerate(rows):
            (file,) = [found for found in folder.glob("**/" + path.replace("[", "[[]")) if found.is_file()]
            assert packed.read(i) == file.read_bytes()
            assert decode(packed.read(i)).mode == "RGB"
    images = [file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg")]
    left_out = [file for file in images if file.parent.name in ("BACKGROUND_Google", "Faces_easy")]
    assert sum(map(len, listed(source).values())) == len(images) - len(left_out)


@pytest.mark.parametrize("name", WRITERS)
def test_a_miniature_is_not_packed_as_the_published_set(name, roots):
    with pytest.raises(UserError) as error:
        published_source(find(name), roots)
    text = str(error.value)
    assert text.startswith(f"'{name}': ") and "published" in text and "get " in text and "\n" not in text


def test_labels_are_those_of_the_published_list_whatever_lies_on_the_disk(roots):
    """Names of folders and of classes, which have no name in common."""
    rows = {name: listed(available(name, roots)) for name in WRITERS}
    by_label = {name: {label: path for part in rows[name].values() for path, label in part} for name in WRITERS}
    wnids = imagenet_wnids()
    for label in FEW_OF_A_THOUSAND:
        assert by_label["imagenet"][label].split("/")[1] == wnids[label]
        assert by_label["imagenet-sketch"][label].split("/")[0] == wnids[label]
        assert by_label["imagenetv2"][label].split("/")[0] == str(label)
    for name in ("imagenet-a", "imagenet-r"):
        raw = find(name).raw
        assert raw and {label: path.split("/")[0] for label, path in by_label[name].items()} == {
            label: wnids[raw.indices[label]] for label in range(3)
        }
    assert by_label["caltech101"][0].startswith("Faces/") and names("caltech101")[0] == "face"
    assert by_label["eurosat"][2].startswith("HerbaceousVegetation/")
    assert names("eurosat")[2] == "Herbaceous Vegetation Land"


def test_imagenet_is_train_and_test_with_sorted_files_and_paths_below_the_images(roots):
    source = available("imagenet", roots)
    assert set(source.counts) == {"train", "test"}, "its val list would be the test list again"
    rows = listed(source)
    assert rows["train"] == sorted(rows["train"], key=lambda row: (row[1], row[0]))
    assert rows["train"][0][0] == "train/n01440764/n01440764_1.JPEG"
    assert rows["test"][0] == ("val/n01440764/ILSVRC2012_val_00000001.JPEG", 0)


def test_the_order_of_split_files_and_text_lists_is_kept(roots):
    raw = find("oxford-flowers").raw
    rows = json.loads((roots / "oxford_flowers" / raw.split_file).read_text())
    source = available("oxford-flowers", roots)
    assert listed(source) == {split: [(path, label) for path, label, _ in part] for split, part in rows.items()}
    assert listed(source)["train"][0][1] == 2, "the first class of the list is not label 0"
    lines = (roots / "fgvc_aircraft" / "images_variant_val.txt").read_text().splitlines()
    val = listed(available("fgvc-aircraft", roots))["val"]
    assert val == [(f"{line[:7]}.jpg", label) for line, label in zip(lines, (2, 1, 0), strict=True)]


def test_real_class_names_with_slashes_capitals_and_another_order_than_text(tmp_path):
    """Labels that a sort of folder names or a clean-up of names would get wrong."""
    for name in ("ucf101", "stanford-cars", "fgvc-aircraft", "sun397"):
        build(name, tmp_path, per_class=5, drawn=False)
    actions = {label: path for path, label in reversed(listed(available("ucf101", tmp_path))["train"])}
    swapped = [actions[label].split("/")[0] for label in (34, 35, 46, 47)]
    assert swapped == ["Hammering", "Hammer_Throw", "Jumping_Jack", "Jump_Rope"]
    assert [actions[label].split("/")[0] for label in range(101)] == list(names("ucf101"))
    assert "Yo_Yo/v_YoYo_g01_c01.jpg" in actions.values()
    assert "Handstand_Pushups/v_HandStandPushups_g01_c01.jpg" in actions.values()
    assert available("stanford-cars", tmp_path).classnames[173] == "2012 Ram C/V Cargo Van Minivan"
    assert {"F-16A/B", "F/A-18"} <= set(available("fgvc-aircraft", tmp_path).classnames)
    scenes = {label: path for path, label in listed(available("sun397", tmp_path))["train"]}
    assert scenes[names("sun397").index("indoor apse")].startswith("a/apse/indoor/sun_")


@pytest.mark.parametrize("name", WRITERS)
def test_folders_as_archives_name_them_are_accepted(name, roots, tmp_path):
    raw, dataset = find(name).raw, find(name)
    expected = listed(available(name, roots))
    for folder in raw.folders:
        for images in raw.images:
            root = tmp_path / f"{raw.folders.index(folder)}-{raw.images.index(images)}"
            (root / folder).parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(roots / raw.folders[0], root / folder, copy_function=os.link)
            if images != raw.images[0]:
                usual = root / folder / raw.images[0]
                for inner in sorted(usual.iterdir()) if images == "." else [usual]:
                    target = root / folder / (inner.name if images == "." else images)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.rename(inner, target)
                if images == ".":
                    usual.rmdir()
            assert find_folder(dataset, root) == root / folder
            assert listed(available(name, root)) == expected, (folder, images)


def test_linked_folders_of_images_work(roots, tmp_path):
    images = tmp_path / "imagenet" / "images"
    images.mkdir(parents=True)
    for folder in ("train", "val"):
        (images / folder).symlink_to(roots / "imagenet" / "images" / folder)
    assert listed(available("imagenet", tmp_path)) == listed(available("imagenet", roots))


def copied(name, roots, root):
    folder = find(name).raw.folders[0]
    shutil.copytree(roots / folder, root / folder)
    return root / folder


@pytest.mark.parametrize(("name", "stray"), [
    ("imagenet-sketch", "not-a-class/x.JPEG"),
    ("imagenet-sketch", "n01440764/Thumbs.db"),
    ("imagenet-sketch", "n01440764/deeper/x.JPEG"),
    ("imagenet-a", "README.txt"),
    ("imagenetv2", "007/x.jpeg"),
    ("imagenet", "train/n00000001/x.JPEG"),
    ("caltech101", "not-a-class/x.jpg"),
])  # fmt: skip
def test_stray_folders_and_files_among_classes_are_left_out(name, stray, roots, tmp_path):
    images = copied(name, roots, tmp_path) / find(name).raw.images[0]
    (images / stray).parent.mkdir(exist_ok=True, parents=True)
    (images / stray).write_bytes(b"x")
    assert listed(available(name, tmp_path)) == listed(available(name, roots))


def test_a_missing_split_file_is_refused_with_its_place_and_the_way_out(roots, tmp_path):
    copied("dtd", roots, tmp_path)
    file = tmp_path / "dtd" / "split_zhou_DescribableTextures.json"
    file.unlink()
    with pytest.raises(UserError, match=f"the official split file {file} is missing; get .*DATASETS.md"):
        published_source(find("dtd"), tmp_path)
    assert not file.exists(), "CoOp would have written a private one"


def test_broken_roots_are_refused(tmp_path):
    empty, file, absent, loop = (tmp_path / name for name in ("empty", "file", "absent", "loop"))
    empty.mkdir()
    loop.mkdir()
    file.touch()
    for name in WRITERS:
        folder = loop / find(name).raw.folders[0]
        folder.symlink_to(folder)
        for root in (empty, file, absent, loop):
            assert find_folder(find(name), root) is None
            with pytest.raises(UserError, match=str(root)):
                published_source(find(name), root)


def test_all_images_that_do_not_decode_are_named(roots, tmp_path):
    images = copied("dtd", roots, tmp_path) / "images"
    bad = sorted(images.rglob("*.jpg"))[::4]
    for i, file in enumerate(bad):
        file.write_bytes((b"", b"<html>not found</html>", file.read_bytes()[:300])[i % 3])
    notes: list[str] = []
    with pytest.raises(UserError, match="'dtd' is not packed"):
        pack_source(replace(available("dtd", tmp_path), per_shard=3), tmp_path / "data", on_note=notes.append)
    broken = [note for note in notes if "is not a readable image" in note]
    assert len(broken) == len(bad) and any("it is empty" in note for note in broken)
    assert all(any(str(file.relative_to(images)) in note for note in broken) for file in bad)


def test_trimaps_are_not_taken_for_the_images_of_pets(tmp_path):
    trimaps = tmp_path / "oxford_pets" / "annotations" / "trimaps"
    trimaps.mkdir(parents=True)
    (trimaps / "Abyssinian_1.png").touch()
    with pytest.raises(UserError, match=r"no folder .*/oxford_pets/images; get images.tar.gz"):
        published_source(find("oxford-pets"), tmp_path)
