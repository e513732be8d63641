"""Public clip-benchmark shards stand for a published test split where they hold its images, else they are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from clip_benchmark_shards import image, sample, write_tar

from shards.catalogue import CATALOGUE, derive_dataset
from shards.errors import DataError, DataUsageError, NotFound
from shards.pack import pack_source
from shards.raw.classnames import published_classnames
from shards.raw.tars import public_source


@pytest.fixture
def small_pets(monkeypatch):
    """OxfordPets with 3 images per class, so that its shards can be made here."""
    small = replace(CATALOGUE["oxford-pets"], counts={"test": 3 * 37})
    return small


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


@pytest.mark.parametrize(
    "change, words",
    [
        ({"images": 110}, "its test split has 110 images, OxfordPets has 111"),
        ({"classes": 36}, "no image has label 36 (1 of 37 are missing)"),
        ({"classes": 38}, "label 37, but labels go from 0 to 36"),
    ],
)
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
    assert dataset.raw is not None
    with pytest.raises(DataUsageError) as error:
        public_source(dataset, "https://huggingface.co/datasets/clip-benchmark/x/tree/main", tmp_path)
    public, problem = dataset.raw.public, dataset.raw.public_problem
    assert problem and problem in str(error.value) and f"procap data pack {name} --raw FOLDER" in str(error.value)
    assert not public or f"{public} cannot stand for CoOp's {dataset.title}" in str(error.value)


@pytest.mark.parametrize(
    "location",
    [
        "https://huggingface.co/datasets/clip-benchmark/wds_imagenet-a/tree/main",
        "https://huggingface.co/datasets/clip-benchmark/wds_imagenet-a",
        "https://huggingface.co/datasets/clip-benchmark/wds_unheard_of/tree/main",
        "https://mirror.example.org/wds_imagenet-a",
        "/data/wds_imagenet-a/",
        "hf://datasets/clip-benchmark/wds_imagenet-a",
    ],
)
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
