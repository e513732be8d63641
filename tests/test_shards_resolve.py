"""Names: data sets of the catalogue, derived ones and ones that only their shards describe, in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run
from local_server import LocalServer
from toy_shards import CLASSNAMES, toy_source

from benchmarks.cli import main
from benchmarks.console.parse import parse_datasets
from procap.errors import UsageError
from runner.config import Target, plan_run
from shards.catalogue import CATALOGUE
from shards.errors import DataError, DataUsageError
from shards.manifest import FILE
from shards.mirror import mirror_root
from shards.pack import pack_source
from shards.resolve import is_packed, resolve_dataset

TEST_ONLY = {"test": 17}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """My birds, a published set with another split, a published set of which the test images alone are packed."""
    root = tmp_path_factory.mktemp("data")
    pack_source(toy_source(name="my-birds.v2", template="a photo of a {}, a type of bird."), root)
    pack_source(toy_source(name="dtd-split7", variant="random split, seed 7, 61 of 5,640 images"), root)
    pack_source(toy_source(name="stanford-cars", counts=TEST_ONLY), root)
    (root / "broken").mkdir()
    (root / "broken" / FILE).write_text("{")
    (root / "nothing").mkdir()
    (root / "Not A Name").mkdir()
    (root / "Not A Name" / FILE).write_text("{}")
    return root


def test_a_set_that_only_its_shards_describe_is_known_by_its_name(data):
    birds = resolve_dataset("My-Birds.v2", data)
    assert (birds.name, birds.base, birds.source, birds.test_only) == ("my-birds.v2", "my-birds.v2", "packed", False)
    assert birds.classnames == CLASSNAMES and dict(birds.counts) == {"train": 23, "val": 21, "test": 17}
    assert birds.template == "a photo of a {}, a type of bird." and birds.variant == ""


def test_a_packed_set_is_told_as_it_is_packed_and_an_absent_one_as_published(data):
    assert resolve_dataset("DTD split7", data).variant == "random split, seed 7, 61 of 5,640 images"
    assert (resolve_dataset("dtd-split7", data).base, resolve_dataset("dtd-split7", data).counts["test"]) == ("dtd", 17)
    assert resolve_dataset("dtd-split8", data).variant == "random split, seed 8"
    assert resolve_dataset("cars", data).test_only and not resolve_dataset("cars", None).test_only
    assert resolve_dataset("dtd", data) is CATALOGUE["dtd"]


def test_a_name_that_is_nowhere_is_answered_with_both_kinds_of_names(data):
    with pytest.raises(DataUsageError, match=r"did you mean my-birds\.v2\?.*known: .*shapes.*, broken.*, my-birds\.v2"):
        resolve_dataset("my-brids.v2", data)
    with pytest.raises(DataUsageError, match="did you mean shapes") as caught:
        resolve_dataset("shaeps", None)
    assert "my-birds" not in str(caught.value)
    with pytest.raises(DataUsageError, match="official split in its folders"):
        resolve_dataset("imagenet-split3", data)


LONG = pytest.param("dtd-split" + "9" * 5000, id="long")


@pytest.mark.parametrize("name", ["", ".", "..", "../data", "a/b", "my-birds.v2/", "not a name", "nothing", LONG])
def test_a_name_is_never_followed_as_a_path(data, name):
    with pytest.raises(DataUsageError, match="unknown data set"):
        resolve_dataset(name, data)


def test_a_set_whose_manifest_is_broken_is_refused_unless_the_catalogue_knows_it(data, tmp_path):
    with pytest.raises(DataError, match="damaged"):
        resolve_dataset("broken", data)
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / FILE).write_text("{")
    assert resolve_dataset("dtd", tmp_path) == CATALOGUE["dtd"] and is_packed(tmp_path, "dtd")


def test_runs_and_targets_take_names_of_packed_sets(data):
    config = plan_run(method="coop", dataset="MY-BIRDS.v2", data=data)
    assert config.dataset == "my-birds.v2" and config.path.startswith("base/my-birds.v2/coop/")
    assert Target.parse("my-birds.v2:novel", data) == Target("my-birds.v2", "novel", "test")
    with pytest.raises(UsageError, match=r"unknown split of stanford-cars 'train'"):
        Target.parse("stanford-cars:all:train", data)
    with pytest.raises(DataUsageError, match=r"unknown data set 'my-birds\.v2'"):
        plan_run(method="coop", dataset="my-birds.v2")


def test_groups_of_data_sets(data, tmp_path):
    assert parse_datasets("all", data) == [
        "shapes",
        "coloured-shapes",
        "textures",
        "petals",
        "tiles",
        "glyphs",
        "digits",
    ]
    assert parse_datasets("my-birds.v2,digits,my-birds.v2", data) == ["my-birds.v2", "digits"]
    with pytest.raises(
        UsageError, match=r"'paper' is the 11 training sets of the paper; 10 are not packed: imagenet, cal"
    ):
        parse_datasets("paper", data)
    eleven = [name for name, dataset in CATALOGUE.items() if dataset.source == "folder" and not dataset.test_only]
    for name in eleven:
        pack_source(toy_source(name=name), tmp_path)
    assert parse_datasets("paper", tmp_path) == eleven and len(eleven) == 11


def test_a_mirror_is_asked_for_the_names_that_it_may_have(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with LocalServer(data) as server:
        root = mirror_root(server.url, tmp_path)
        assert resolve_dataset("my-birds.v2", root).counts["val"] == 21 and resolve_dataset("cars", root).test_only
        assert not is_packed(root, "shapes") and resolve_dataset("shapes", root) == CATALOGUE["shapes"]
        with pytest.raises(DataUsageError, match="unknown data set 'mine'"):
            resolve_dataset("mine", root)
        assert main(["ls", "datasets", "--data", server.url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in rows if row["packed"]] == ["stanford-cars", "my-birds.v2"]


def test_the_list_of_data_sets_holds_what_is_packed(data, capsys):
    code, out, err = run(capsys, "ls", "datasets", "--data", data, "--json")
    assert code == 0 and "damaged" in err
    rows = {row["name"]: row for row in json.loads(out.splitlines()[-1])}
    assert list(rows)[-2:] == ["dtd-split7", "my-birds.v2"] and set(CATALOGUE) < set(rows)
    kept = {"name", "classes", "images", "packed", "test_only", "template", "aliases", "licence", "description"}
    assert all(kept | {"title", "variant", "get"} <= set(row) for row in rows.values())
    assert [name for name, row in rows.items() if row["packed"]] == ["stanford-cars", "dtd-split7", "my-birds.v2"]
    assert rows["my-birds.v2"]["images"] == {"train": 23, "val": 21, "test": 17}
    assert rows["dtd-split7"]["variant"].startswith("random split, seed 7") and "robots.ox" in rows["dtd"]["get"]
    [line] = [line for line in out.splitlines() if line.startswith("stanford-cars")]
    assert "-/-/17" in line and "in part" in line
    [line] = [line for line in out.splitlines() if line.startswith("dtd-split7")]
    assert line.endswith("random split, seed 7, 61 of 5,640 images")
