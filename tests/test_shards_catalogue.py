"""Data sets by name: the fifteen published ones line by line, derived ones, and ones that only shards describe."""

import csv
from pathlib import Path

import pytest
from published_splits import split_files
from toy_shards import CLASSNAMES, toy_source

from benchmarks.console.parse import expand_datasets, parse_datasets
from procap.errors import UsageError, UserError
from shards.catalogue import CATALOGUE, PUBLISHED, find
from shards.manifest import MANIFEST_FILE, lines_digest
from shards.pack import pack_source
from shards.raw.published import imagenet_wnids, published_classnames, raw_layout
from shards.resolve import is_packed, resolve_dataset

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "benchmarks" / "experiment" / "published"
SETS = {dataset.name: dataset for dataset in PUBLISHED}


# Name, title in the paper, folder and image folder of CoOp, classes, and images of train, val and test.
TABLE = [
    ("imagenet", "ImageNet", "imagenet", "images", 1000, (1281167, None, 50000)),
    ("caltech101", "Caltech101", "caltech-101", "101_ObjectCategories", 100, (4128, 1649, 2465)),
    ("oxford-pets", "OxfordPets", "oxford_pets", "images", 37, (2944, 736, 3669)),
    ("stanford-cars", "StanfordCars", "stanford_cars", ".", 196, (6509, 1635, 8041)),
    ("oxford-flowers", "Flowers102", "oxford_flowers", "jpg", 102, (4093, 1633, 2463)),
    ("food101", "Food101", "food-101", "images", 101, (50500, 20200, 30300)),
    ("fgvc-aircraft", "FGVCAircraft", "fgvc_aircraft", "images", 100, (3334, 3333, 3333)),
    ("sun397", "SUN397", "sun397", "SUN397", 397, (15880, 3970, 19850)),
    ("dtd", "DTD", "dtd", "images", 47, (2820, 1128, 1692)),
    ("eurosat", "EuroSAT", "eurosat", "2750", 10, (13500, 5400, 8100)),
    ("ucf101", "UCF101", "ucf101", "UCF-101-midframes", 101, (7639, 1898, 3783)),
    ("imagenetv2", "ImageNetV2", "imagenetv2", "imagenetv2-matched-frequency-format-val", 1000, (None, None, 10000)),
    ("imagenet-sketch", "ImageNet-Sketch", "imagenet-sketch", "images", 1000, (None, None, 50889)),
    ("imagenet-a", "ImageNet-A", "imagenet-adversarial", "imagenet-a", 200, (None, None, 7500)),
    ("imagenet-r", "ImageNet-R", "imagenet-rendition", "imagenet-r", 200, (None, None, 30000)),
]

COOP_TEMPLATES = {
    "oxford-pets": "a photo of a {}, a type of pet.", "oxford-flowers": "a photo of a {}, a type of flower.",
    "food101": "a photo of {}, a type of food.", "fgvc-aircraft": "a photo of a {}, a type of aircraft.",
    "dtd": "{} texture.", "eurosat": "a centered satellite photo of {}.", "ucf101": "a photo of a person doing {}.",
}  # fmt: skip


def test_the_fifteen_sets_are_those_of_the_paper_in_its_order():
    assert [dataset.name for dataset in PUBLISHED] == [row[0] for row in TABLE]
    assert all(CATALOGUE[dataset.name] is dataset and dataset.images_from == "published" for dataset in PUBLISHED)


@pytest.mark.parametrize(("name", "title", "folder", "images", "classes", "counts"), TABLE)
def test_a_set_has_the_published_sizes_and_lies_where_coop_puts_it(name, title, folder, images, classes, counts):
    dataset = SETS[name]
    assert (dataset.title, dataset.num_classes) == (title, classes)
    present = {split: count for split, count in zip(("train", "val", "test"), counts, strict=True) if count}
    assert dict(dataset.counts) == present
    assert dataset.test_only == (list(present) == ["test"])
    assert (raw_layout(SETS[name]).folders[0], raw_layout(SETS[name]).images[0]) == (folder, images)
    assert len(set(raw_layout(SETS[name]).folders)) == len(raw_layout(SETS[name]).folders)
    assert dataset.licence and "https://" in raw_layout(SETS[name]).get


def test_sizes_and_descriptions_are_those_the_paper_prints():
    rows = {row["dataset"]: row for row in csv.DictReader((TABLES / "datasets.csv").open())}
    assert [dataset.title for dataset in PUBLISHED] == list(rows)
    for dataset in PUBLISHED:
        row = rows[dataset.title]
        printed = {split: row[split] for split in ("train", "val", "test") if row[split]}
        ours = {split: str(count) for split, count in dataset.counts.items()}
        if dataset.name == "imagenet":
            ours["train"] = f"{dataset.counts['train'] / 1e6:.2f}M"
        assert (ours, str(dataset.num_classes)) == (printed, row["classes"])
        assert dataset.description.lower().startswith(row["description"].lower())


@pytest.mark.parametrize("dataset", PUBLISHED, ids=lambda dataset: dataset.name)
def test_prompts_are_coops_with_a_full_stop_and_the_papers_two_without(dataset):
    assert dataset.template == COOP_TEMPLATES.get(dataset.name, "a photo of a {}.")
    assert len(dataset.templates) == len(set(dataset.templates)) == 2
    for template in (dataset.template, *dataset.templates):
        assert template.count("{}") == 1 and template.strip() == template
        assert template.format("x").count("x") - template.count("x") == 1
    assert dataset.template.endswith(".") and not any("." in template for template in dataset.templates)


def test_the_papers_prompts_are_those_it_prints():
    lines = csv.DictReader((TABLES / "templates.csv").open())
    rows = {row["dataset"]: (row["template_1"], row["template_2"]) for row in lines}
    assert len(rows) == 11
    # The shifts are not in its list: they are asked for as ImageNet is.
    assert {dataset.title: dataset.templates for dataset in PUBLISHED} == {
        dataset.title: rows.get(dataset.title, rows["ImageNet"]) for dataset in PUBLISHED
    }


@pytest.mark.parametrize("dataset", PUBLISHED, ids=lambda dataset: dataset.name)
def test_class_names_are_the_published_ones_in_label_order(dataset):
    names = published_classnames(dataset)
    assert len(names) == dataset.num_classes
    assert lines_digest(names) == raw_layout(dataset).classnames_digest
    assert all(name and name == name.strip() and "\n" not in name for name in names)


def test_wordnet_ids_are_the_published_ones():
    wnids, names = imagenet_wnids(), published_classnames(SETS["imagenet"])
    assert lines_digest(wnids) == "385e0240499426c0" and list(wnids) == sorted(set(wnids))
    assert lines_digest(f"{wnid} {name}" for wnid, name in zip(wnids, names, strict=True)) == "51b5b1d8b8005020"
    for name, digest in (("imagenet-a", "f6aa4b23244554d9"), ("imagenet-r", "e19a59d84e3746fa")):
        indices = raw_layout(SETS[name]).indices
        assert len(indices) == 200 and lines_digest(wnids[index] for index in indices) == digest
        assert published_classnames(SETS[name]) == tuple(names[index] for index in indices)
        assert len(set(published_classnames(SETS[name]))) == 200
    assert len(set(raw_layout(SETS["imagenet-a"]).indices) & set(raw_layout(SETS["imagenet-r"]).indices)) == 86
    assert not any(raw_layout(SETS[name]).indices for name in SETS if name not in ("imagenet-a", "imagenet-r"))


SPLIT_FILES = {name: SETS[name].raw.split_file for name in SETS if SETS[name].raw and SETS[name].raw.split_file}


@pytest.mark.parametrize("name", [name for name in SPLIT_FILES if name not in ("food101", "sun397")])
def test_published_split_files_are_recognised(name):
    lists = split_files()[SPLIT_FILES[name]]
    assert {split: len(records) for split, records in lists.items()} == SETS[name].counts
    digests = {
        split: lines_digest(f"{path}\t{label}\t{classname}" for path, label, classname in records)
        for split, records in lists.items()
    }
    assert digests == raw_layout(SETS[name]).split_digests
    names = published_classnames(SETS[name])
    for split in lists:
        assert {(label, classname) for _, label, classname in lists[split]} == set(enumerate(names))


@pytest.mark.parametrize("dataset", PUBLISHED, ids=lambda dataset: dataset.name)
def test_a_set_is_found_by_the_names_of_coop_of_the_paper_and_of_its_folder(dataset):
    for spelling in (dataset.name, *dataset.aliases, dataset.title, raw_layout(dataset).folders[0]):
        for written in (spelling, spelling.upper(), spelling.replace("_", " "), spelling.replace("-", "_")):
            assert find(written) is dataset
    assert find("DescribableTextures") is SETS["dtd"] and find("OxfordFlowers") is SETS["oxford-flowers"]


def test_a_misspelt_set_is_answered_with_the_nearest_name():
    with pytest.raises(UsageError, match=r"did you mean .*imagenet-sketch"):
        find("imagenet-skech")


TEST_ONLY = {"test": 17}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """My birds, and a published set of which the test images alone are packed."""
    root = tmp_path_factory.mktemp("data")
    pack_source(toy_source(name="my-birds.v2", template="a photo of a {}, a type of bird."), root)
    pack_source(toy_source(name="stanford-cars", counts=TEST_ONLY), root)
    (root / "broken").mkdir()
    (root / "broken" / MANIFEST_FILE).write_text("{")
    (root / "nothing").mkdir()
    (root / "Not A Name").mkdir()
    (root / "Not A Name" / MANIFEST_FILE).write_text("{}")
    return root


def test_a_set_that_only_its_shards_describe_is_known_by_its_name(data):
    birds = resolve_dataset("My-Birds.v2", data)
    assert (birds.name, birds.images_from, birds.test_only) == ("my-birds.v2", "own", False)
    assert birds.classnames == CLASSNAMES and dict(birds.counts) == {"train": 23, "val": 21, "test": 17}
    assert birds.template == "a photo of a {}, a type of bird."


def test_a_name_that_is_nowhere_is_answered_with_both_kinds_of_names(data, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"did you mean my-birds\.v2\?$"):
        resolve_dataset("my-brids.v2", data)
    with pytest.raises(UsageError, match=r"known: .*shapes.*, broken.*, my-birds\.v2"):
        resolve_dataset("qqq", data)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "birds").mkdir()
    with pytest.raises(UsageError, match=r"'./birds': pack the folder first: procap data pack ./birds$"):
        resolve_dataset("./birds", data)
    with pytest.raises(UsageError, match="did you mean shapes") as caught:
        resolve_dataset("shaeps", None)
    assert "my-birds" not in str(caught.value)


LONG = pytest.param("dtd-split" + "9" * 5000, id="long")


@pytest.mark.parametrize("name", ["", ".", "..", "../data", "a/b", "my-birds.v2/", "not a name", "nothing", LONG])
def test_a_name_is_never_followed_as_a_path(data, name):
    with pytest.raises(UsageError, match="unknown data set"):
        resolve_dataset(name, data)


def test_a_set_whose_manifest_is_broken_is_refused_unless_the_catalogue_knows_it(data, tmp_path):
    with pytest.raises(UserError, match="damaged"):
        resolve_dataset("broken", data)
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / MANIFEST_FILE).write_text("{")
    assert resolve_dataset("dtd", tmp_path) == CATALOGUE["dtd"] and is_packed(tmp_path, "dtd")


def test_groups_of_data_sets(data, tmp_path):
    world = ["shapes", "coloured-shapes", "textures", "petals", "tiles", "glyphs", "digits"]
    assert parse_datasets("all", data) == world
    assert parse_datasets("my-birds.v2,digits,my-birds.v2", data) == ["my-birds.v2", "digits"]
    eleven = [
        name for name, dataset in CATALOGUE.items() if dataset.images_from == "published" and not dataset.test_only
    ]
    assert parse_datasets("paper", tmp_path) == eleven and len(eleven) == 11


def test_a_group_has_one_meaning_and_any_capitals():
    assert expand_datasets("ALL") == expand_datasets("all") and "shapes-v2" in expand_datasets("All")
    assert expand_datasets("Paper,dtd")[:2] == ["imagenet", "caltech101"] and len(expand_datasets("paper,dtd")) == 15
    assert expand_datasets("digits,all", trained=True)[0] == "digits"
