"""Packing: the public convention, the same bytes each time, and nothing half done that looks finished."""

import io
import multiprocessing
import shutil
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from command_line import read_files
from PIL import Image
from toy_shards import (
    CLASSNAMES,
    COUNTS,
    SAME_PATH,
    broken,
    is_whole,
    label,
    pack_some_shapes,
    pixels,
    toy_records,
    toy_source,
)

from procap import errors
from shards import builtin_sources, catalogue, reader
from shards.manifest import lines_digest
from shards.pack import pack_source
from shards.source import ImageRecord, png
from shards.world.generate import VERSION, paint, sample_seed


@pytest.mark.slow
def test_a_family_of_the_world_packs_to_the_same_bytes_in_another_process(tmp_path):
    pack_some_shapes(tmp_path / "a")
    code = (
        "import sys, shards.image_selection; from pathlib import Path; from toy_shards import *\n"
        f"pack_some_shapes(Path({str(tmp_path / 'b')!r}))\n"
        "next(builtin_source(find('digits')).make_reader('test', 0, 1)())\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**SAME_PATH, "PYTHONHASHSEED": "7"})
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


def test_layout_is_the_clip_benchmark_convention(tmp_path):
    pack_source(toy_source(per_shard=5), tmp_path)
    root = tmp_path / "toy"
    names = [name.replace("_", " ") for name in CLASSNAMES]
    assert (root / "classnames.txt").read_text().splitlines() == names, "as prompts have them"
    assert reader.open_dataset(tmp_path, "toy").classnames == CLASSNAMES, "as they were given"
    templates = (root / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert templates[0].format(c="kite") == "a photo of a kite."
    for split, count in COUNTS.items():
        shards = int((root / split / "nshards.txt").read_text())
        assert shards == -(-count // 5) == len(list((root / split).glob("*.tar")))
        assert all((root / split / f"{i}.tar").is_file() for i in range(shards))


@pytest.mark.filterwarnings("ignore")
def test_the_webdataset_library_reads_our_shards(tmp_path):
    wds = pytest.importorskip("webdataset")
    pack_source(toy_source(per_shard=5), tmp_path)
    urls = [str(tmp_path / "toy/test" / f"{i}.tar") for i in range(4)]
    samples = list(wds.WebDataset(urls, shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in samples] == [f"s{i:07d}" for i in range(COUNTS["test"])]
    for i, sample in enumerate(samples):
        assert int(sample["cls"]) == label(i)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(sample["png"]))), pixels("test", i))


def test_split_digest_is_that_of_the_published_list_format(tmp_path):
    manifest = pack_source(toy_source(), tmp_path)
    lines = [f"test/{CLASSNAMES[label(i)]}/{i}.png\t{label(i)}\t{CLASSNAMES[label(i)]}" for i in range(COUNTS["test"])]
    assert manifest.splits["test"].digest == lines_digest(lines)


def refuse(split):
    raise AssertionError("a valid set must not be packed again")
    yield


def test_a_valid_set_is_kept_and_force_packs_again(tmp_path):
    first = pack_source(toy_source(), tmp_path)
    assert pack_source(toy_source(refuse), tmp_path) == first
    with pytest.raises(AssertionError, match="valid set"):
        pack_source(toy_source(refuse), tmp_path, force=True)
    assert reader.open_dataset(tmp_path, "toy").manifest == first, "a failed --force must leave the old set"


def test_a_damaged_or_outdated_set_is_packed_again(tmp_path):
    first = pack_source(toy_source(), tmp_path)
    (tmp_path / "toy/test/0.tar").write_bytes(b"")
    assert pack_source(toy_source(), tmp_path) == first and is_whole(tmp_path, "toy")
    renamed = pack_source(toy_source(classnames=("a", "b", "c", "d", "e")), tmp_path)
    assert reader.open_dataset(tmp_path, "toy").classnames == renamed.classnames == ("a", "b", "c", "d", "e")
    pack_source(toy_source(swapped_colours, origin="another version"), tmp_path)
    image = reader.open_dataset(tmp_path, "toy").open_images("test").image(3)
    assert np.array_equal(np.asarray(image), pixels("test", 3)[..., ::-1])


def swapped_colours(split):
    for i, record in enumerate(toy_records(split)):
        yield ImageRecord(record.path, record.label, png(pixels(split, i)[..., ::-1]))


# Per version of the renderer and family: what `appearance` sees of one picture of every class.
RENDERED: dict[int, dict[str, tuple[float, ...]]] = {
    1: {
        "shapes": (111.873, 63.686, 56.324, 57.008, 127.982),
        "coloured-shapes": (140.224, 57.647, 70.781, 69.276, 118.989),
        "textures": (139.839, 57.932, 69.586, 69.66, 115.333),
        "petals": (69.208, 59.174, 35.548, 34.662, 57.092),
        "tiles": (147.082, 37.826, 73.066, 74.564, 156.172),
        "glyphs": (84.303, 56.177, 41.834, 42.596, 79.236),
        "shapes-v2": (122.353, 53.224, 61.306, 60.955, 128.93),
        "shapes-sketch": (227.918, 47.508, 113.9, 114.058, 227.904),
        "shapes-hard": (122.239, 71.875, 61.061, 61.264, 115.12),
        "shapes-art": (122.254, 83.24, 61.061, 61.549, 121.02),
    }
}


def appearance(family: str) -> tuple[float, ...]:
    """Mean, spread and slants: a changed picture moves them, the last bit of a processor's sine does not."""
    classes = catalogue.CATALOGUE[family].num_classes
    seeds = np.array([sample_seed(family, "test", i) for i in range(classes)], np.int64)
    pictures = paint(family, np.arange(classes), seeds)[0].astype(np.float64)
    ramp = np.linspace(0, 1, pictures.shape[1])
    slants = ((pictures * weights).mean() for weights in (ramp[:, None, None], ramp[:, None], np.array([0, 1, 2])))
    return tuple(round(float(value), 3) for value in (pictures.mean(), pictures.std(), *slants))


@pytest.mark.parametrize("family", RENDERED[VERSION])
def test_a_changed_renderer_has_a_new_version(family):
    """Without one, sets that were packed by the old renderer would be kept."""
    assert builtin_sources.builtin_source(catalogue.find(family)).origin == f"world {VERSION}"
    mend = f"raise VERSION in shards/world/generate.py and pin in RENDERED what it draws now: {appearance(family)}"
    assert appearance(family) == pytest.approx(RENDERED.get(VERSION, {}).get(family), abs=0.01), mend


def pack_slowly(root: Path) -> None:
    def slow(split):
        for record in toy_records(split):
            time.sleep(0.01)
            yield record

    pack_source(toy_source(slow, per_shard=5), root)


def test_two_processes_packing_at_once_both_end_well(tmp_path):
    context = multiprocessing.get_context("fork")
    # Daemons end with the tests, should they wait for each other for ever.
    processes = [context.Process(target=pack_slowly, args=(tmp_path,), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
    assert [process.exitcode for process in processes] == [0, 0]
    assert is_whole(tmp_path, "toy")
    assert [entry.name for entry in tmp_path.iterdir()] == ["toy"]


def test_a_folder_of_raw_images_is_never_replaced(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/cat.jpg").write_bytes(b"mine")
    for force in (False, True):
        with pytest.raises(errors.UserError, match="is no packed data set"):
            pack_source(toy_source(), tmp_path, force=force)
    assert (tmp_path / "toy/cat.jpg").read_bytes() == b"mine"


def test_an_unwritable_root_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UserError) as error:
        pack_source(toy_source(), tmp_path / "file")
    assert "\n" not in str(error.value) and "--data" in str(error.value)
    # No file can be made there, though the folder exists, as in one that was deleted.
    with pytest.raises(errors.UserError, match="cannot write /proc: No such file or directory"):
        pack_source(toy_source(), Path("/proc"))


def test_a_broken_image_is_refused_by_name(tmp_path):
    def records(split):
        yield from islice(toy_records(split), COUNTS[split] - 1)
        yield ImageRecord("test/x/0.png", 0, b"not an image")

    with pytest.raises(errors.UserError, match=r"test/x/0\.png is not a readable image"):
        pack_source(toy_source(records), tmp_path)
    with pytest.raises(errors.UserError, match="no shards of 'toy'"):
        reader.open_dataset(tmp_path, "toy")


@pytest.mark.parametrize(("changes", "stored"), [
    ({"problems": ("class 'kite' has no val image",)}, 0),
    ({"make_reader": partial(partial, broken)}, 8),
])  # fmt: skip
def test_after_a_problem_the_images_are_read_and_no_longer_stored(tmp_path, changes, stored):
    """Of 14 shards; the image of val that does not decode lies in the third of it, after five of train."""
    counts = []

    def count_shards(*_):
        counts.append(sum(path.stat().st_size > 0 for path in tmp_path.rglob("*.tar")))

    with pytest.raises(errors.UserError, match=r"kite|not a readable"):
        pack_source(toy_source(per_shard=5, **changes), tmp_path, on_progress=count_shards)
    assert len(counts) == 14 and max(counts) == stored and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("path", "message"), [
    ("test/no_extension", "does not end as an image's does"),
    ("test/two\nlines.png", "holds characters that do not"),
    ("test/\udcff.png", "characters that do not"),
])  # fmt: skip
def test_a_name_that_cannot_be_stored_is_refused_in_one_line(tmp_path, path, message):
    data = next(toy_records("test")).data
    source = toy_source(lambda split: iter([ImageRecord(path, 0, data)]), counts={"test": 1})
    with pytest.raises(errors.UserError, match=message) as error:
        pack_source(source, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"classnames": ("a", "b\n", "c", "d", "e")}, r"class name 1 is 'b\\n'"),
    ({"classnames": ("a", "b", "c", "d", "_")}, "class name 4 is '_'"),
    ({"classnames": ("a", "b", "c\u2028c", "d", "e")}, "class name 2"),
    ({"template": "a photo of a {}. "}, "the template is"),
    ({"templates": ("a {nice} {}",)}, "must hold one {}"),
    ({"counts": {"test": 0}}, "has no images"),
])  # fmt: skip
def test_names_that_other_readers_would_read_otherwise_are_refused(tmp_path, changes, message):
    with pytest.raises(errors.UserError, match=message):
        pack_source(toy_source(**changes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_class_names_may_repeat_and_hold_what_paths_may_not(tmp_path):
    names = ("missile", "missile", "a/b", "bird's nest", "{} brace")
    pack_source(toy_source(classnames=names), tmp_path)
    assert reader.open_dataset(tmp_path, "toy").classnames == names
    assert (tmp_path / "toy/classnames.txt").read_text().splitlines() == list(names)


def test_an_image_that_is_listed_twice_in_a_split_is_refused(tmp_path):
    def twice(split):
        records = list(toy_records(split))
        yield from (*records[:-1], records[4])

    with pytest.raises(errors.UserError, match=r"'toy' train: 'train/.*/4\.png' is listed twice"):
        pack_source(toy_source(twice, per_shard=5), tmp_path)


def test_a_shard_holds_fewer_images_where_they_are_large(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**10))
    manifest = pack_source(toy_source(total_bytes=61 * 10**8, per_shard=20), tmp_path)
    assert [shard.count for shard in manifest.splits["train"].shards] == [10, 10, 3]


def test_every_catalogue_entry_can_be_packed_as_it_says(monkeypatch):
    monkeypatch.setattr("shards.builtin_sources.RENDER_BATCH", 1)
    for dataset in (dataset for dataset in catalogue.CATALOGUE.values() if dataset.images_from != "published"):
        source = builtin_sources.builtin_source(dataset)
        assert len(source.classnames) == dataset.num_classes == len(set(source.classnames))
        assert dataset.template.count("{}") == 1 and dataset.template.endswith(".")
        assert len(dataset.templates) == 2
        assert all(t.count("{}") == 1 and not t.endswith(".") for t in dataset.templates)
        first = next(source.make_reader("test", 0, 1)())
        assert Image.open(io.BytesIO(first.data)).size[0] >= 8


def test_digit_scans_are_split_50_20_30_per_class_without_overlap(tmp_path):
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    scans = sklearn_datasets.load_digits()
    manifest = pack_source(builtin_sources.builtin_source(catalogue.find("digits")), tmp_path)
    assert {name: split.count for name, split in manifest.splits.items()} == dict(catalogue.find("digits").counts)
    dataset = reader.open_dataset(tmp_path, "digits")
    seen: dict[int, str] = {}
    for name, share in (("train", 0.5), ("val", 0.2), ("test", 0.3)):
        split = dataset.open_images(name)
        present = np.bincount(split.labels)
        assert np.all(np.abs(present - share * np.bincount(scans.target)) <= 1)
        for i, path in enumerate(split.paths):
            position = int(Path(path).stem)
            assert position not in seen and scans.target[position] == split.labels[i]
            seen[position] = name
            if i % 50 == 0:
                grey = np.asarray(split.image(i))[..., 0]
                assert np.array_equal(np.rint(grey / (255 / 16)), scans.images[position])
    assert len(seen) == len(scans.target)
