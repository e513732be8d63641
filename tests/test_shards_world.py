"""Generated images of different classes differ, and the contact sheet shows the images that it names."""

import numpy as np
import pytest
from PIL import Image
from toy_shards import CLASSNAMES, COUNTS, pixels, toy_source

from benchmarks.studies.train_mini.teacher import caption
from shards import catalogue, contact_sheet, errors, pack
from shards.world.generate import CLASSNAMES as FAMILIES
from shards.world.generate import Style, paint, sample_seed

STYLES: tuple[Style, ...] = ("own", "plain")


def _some(family: str, count: int, split: str = "test") -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % len(FAMILIES[family])
    return labels, np.array([sample_seed(family, split, k) for k in range(count)], np.int64)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_does_not_depend_on_its_batch(family, style):
    labels, seeds = _some(family, 2 * len(FAMILIES[family]) + 3)
    together = paint(family, labels, seeds, style)[0]
    order = np.random.default_rng(0).permutation(len(labels))
    shuffled = paint(family, labels[order], seeds[order], style)[0]
    alone = paint(family, labels[5:6], seeds[5:6], style)[0]
    assert np.array_equal(together[order], shuffled) and np.array_equal(together[5], alone[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_gives_a_picture_with_something_in_it(family):
    classes = len(FAMILIES[family])
    for style in STYLES:
        pictures = paint(family, np.arange(classes), np.arange(classes), style)[0]
        assert pictures.shape == (classes, 64, 64, 3) and pictures.dtype == np.uint8
        assert (pictures.std(axis=(1, 2)).max(axis=-1) > 4).all()


def test_no_two_splits_families_or_worlds_share_a_seed():
    splits = [(family, *one) for family in FAMILIES for one in catalogue.CATALOGUE[family].counts.items()]
    images = [(family, split, index) for family, split, count in splits for index in range(count)]
    seeds = [sample_seed(*image, world) for image in images for world in (0, 1)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63


def test_seeds_and_pixels_stay_what_they_were():
    """Packed data sets and the shipped weights were made from these very numbers."""
    assert sample_seed("shapes", "train", 0) == 2921336399285272978
    picture = paint("shapes", np.array([0]), np.array([sample_seed("shapes", "train", 0)]), "plain")[0][0]
    corners = picture[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.abs(corners.astype(int) - np.array([10, 12, 12])).max() <= 1


def test_the_shifted_sets_keep_the_classes_of_their_source_and_are_for_testing_only():
    shifted = [about for name, about in catalogue.CATALOGUE.items() if name.startswith("shapes-")]
    assert len(shifted) == 4
    for about in shifted:
        assert about.classnames == catalogue.CATALOGUE["shapes"].classnames and about.test_only


def test_a_caption_tells_the_colours_that_are_in_the_picture():
    """The caption's background is the plain picture's corner."""
    greens = [seed for seed in range(200) if caption("shapes", 0, seed).endswith("green background.")]
    pictures = paint("shapes", np.zeros(len(greens), int), np.array(greens), "plain")[0]
    corner = pictures[:, 0, 0].astype(int)
    assert len(greens) > 4 and (corner[:, 1] > corner[:, 0] + 40).all()


# A colour as one number.
CODE = np.array([1, 256, 65536])


def test_a_contact_sheet_holds_every_test_image(tmp_path):
    pack.pack_source(toy_source(), tmp_path)
    sheet = tmp_path / "sheets/toy.png"
    contact_sheet.contact_sheet(tmp_path, "toy", "test", sheet, per_class=COUNTS["test"])
    page = np.asarray(Image.open(sheet).convert("RGB"))
    assert page.shape[0] > 300 and page.shape[1] > 300
    colours = np.unique(page.reshape(-1, 3).astype(int) @ CODE)
    assert all(pixels("test", i)[0, 0].astype(int) @ CODE in colours for i in range(COUNTS["test"]))
    assert [file.name for file in sheet.parent.iterdir()] == ["toy.png"]


def test_a_sheet_that_cannot_be_written_is_one_line(tmp_path):
    pack.pack_source(toy_source(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.DataError, match="cannot be written") as error:
        contact_sheet.contact_sheet(tmp_path, "toy", "test", tmp_path / "file/toy.png")
    assert "\n" not in str(error.value)


def test_classes_without_images_take_no_room(tmp_path):
    pack.pack_source(toy_source(), tmp_path / "few")
    pack.pack_source(toy_source(classnames=(*CLASSNAMES, *(f"absent {i}" for i in range(500)))), tmp_path / "many")
    few, many = (tmp_path / f"{data}.png" for data in ("few", "many"))
    for sheet in (few, many):
        contact_sheet.contact_sheet(tmp_path / sheet.stem, "toy", "test", sheet)
    assert Image.open(many).height == Image.open(few).height


def test_a_dollar_in_a_class_name_begins_no_formula(tmp_path):
    names = (r"$\foo$", "$5 bill", *CLASSNAMES[2:])
    pack.pack_source(toy_source(classnames=names), tmp_path)
    contact_sheet.contact_sheet(tmp_path, "toy", "test", tmp_path / "toy.png")
    assert (tmp_path / "toy.png").stat().st_size
