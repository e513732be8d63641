"""`croissant.json` of a packed data set: the shards and records that other programs read by it."""

import hashlib
import json

import pytest

from shards.builtin_sources import builtin_source
from shards.catalogue import find
from shards.croissant import FILE
from shards.manifest import read_manifest
from shards.pack import pack_source
from shards.reader import open_dataset


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    pack_source(builtin_source(find("digits")), root, per_shard=300)
    return root / "digits"


def test_it_lists_every_shard_by_its_hash_and_the_class_names(digits):
    document = json.loads((digits / FILE).read_text())
    assert document["conformsTo"] == "http://mlcommons.org/croissant/1.0" and document["license"]
    shards = {item["contentUrl"]: item for item in document["distribution"] if item["@type"] == "cr:FileObject"}
    assert sorted(shards) == sorted(str(tar.relative_to(digits)) for tar in digits.rglob("*.tar"))
    for file, shard in shards.items():
        assert shard["sha256"] == hashlib.sha256((digits / file).read_bytes()).hexdigest()
    defined = {item["@id"] for item in document["distribution"]}
    used = [field["source"]["fileSet"]["@id"] for records in document["recordSet"][1:] for field in records["field"]]
    contained = [part["@id"] for item in document["distribution"] for part in item.get("containedIn", ())]
    assert {*used, *contained} == defined, "every file belongs to a record set"
    names = [row["classes/name"] for row in document["recordSet"][0]["data"]]
    assert names == list(find("digits").classnames)


def test_the_manifest_does_not_depend_on_it(digits):
    before = read_manifest(digits).digest
    (digits / FILE).rename(digits / "moved.json")
    assert pack_source(builtin_source(find("digits")), digits.parent).digest == before
    (digits / "moved.json").rename(digits / FILE)


def test_mlcroissant_reads_the_images_and_labels(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("CROISSANT_CACHE", str(tmp_path))
    mlcroissant = pytest.importorskip("mlcroissant")
    dataset = mlcroissant.Dataset(digits / FILE)
    images, labels = list(dataset.records("test/images")), list(dataset.records("test/labels"))
    assert len(images) == len(labels) == 540 and images[0]["test/images/image"].size == (8, 8)
    by_key = {row["test/labels/key"]: row["test/labels/label"] for row in labels}
    expected = open_dataset(digits.parent, "digits").labels("test")
    assert [by_key[f"s{position:07d}".encode()] for position in range(540)] == list(expected)
    assert {row["test/images/key"] for row in images} == set(by_key)
