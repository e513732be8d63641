"""The contact sheet shows the images it says it shows."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from toy_shards import CLASSNAMES, COUNTS, pixels, toy_source

from shards.contact_sheet import contact_sheet
from shards.errors import DataError
from shards.pack import pack_source

# A colour as one number.
CODE = np.array([1, 256, 65536])


def test_a_contact_sheet_holds_every_test_image(tmp_path):
    pack_source(toy_source(), tmp_path)
    sheet = tmp_path / "sheets/toy.png"
    contact_sheet(tmp_path, "toy", "test", sheet, per_class=COUNTS["test"])
    page = np.asarray(Image.open(sheet).convert("RGB"))
    assert page.shape[0] > 300 and page.shape[1] > 300
    colours = np.unique(page.reshape(-1, 3).astype(int) @ CODE)
    assert all(pixels("test", i)[0, 0].astype(int) @ CODE in colours for i in range(COUNTS["test"]))
    assert [file.name for file in sheet.parent.iterdir()] == ["toy.png"]


def test_a_sheet_that_cannot_be_written_is_one_line(tmp_path):
    pack_source(toy_source(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written") as error:
        contact_sheet(tmp_path, "toy", "test", tmp_path / "file/toy.png")
    assert "\n" not in str(error.value)


def test_classes_without_images_take_no_room(tmp_path):
    pack_source(toy_source(), tmp_path / "few")
    pack_source(toy_source(classnames=(*CLASSNAMES, *(f"absent {i}" for i in range(500)))), tmp_path / "many")
    few, many = (tmp_path / f"{data}.png" for data in ("few", "many"))
    for sheet in (few, many):
        contact_sheet(tmp_path / sheet.stem, "toy", "test", sheet)
    assert Image.open(many).height == Image.open(few).height


def test_a_dollar_in_a_class_name_begins_no_formula(tmp_path):
    names = (r"$\foo$", "$5 bill", *CLASSNAMES[2:])
    pack_source(toy_source(classnames=names), tmp_path)
    contact_sheet(tmp_path, "toy", "test", tmp_path / "toy.png")
    assert (tmp_path / "toy.png").stat().st_size
