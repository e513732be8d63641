"""`procap data fetch` from a local server in the layout of the Hub, and from a local server of official archives."""

import hashlib
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pyarrow.parquet
import pytest
from command_line import run
from local_server import Answer, LocalServer
from miniature_roots import available, build

from benchmarks.cli.data_sources import select_published
from procap.errors import UserError
from shards import catalogue
from shards.catalogue import Archive, find
from shards.fetch import HUB_REPOSITORY, IMAGENET_REPOSITORY, plan_fetch, unpack, unpack_parquet, work_folder
from shards.manifest import lines_digest, read_manifest
from shards.pack import pack_source
from shards.raw.published import find_location, imagenet_wnids, read_published

pytestmark = pytest.mark.usefixtures("at_home")
TREE, FILES = f"api/models/{HUB_REPOSITORY}/tree/main", f"{HUB_REPOSITORY}/resolve/main"


@pytest.fixture
def miniature(tmp_path, monkeypatch):
    """A raw root with a DTD of few images, which takes the place of the published one in the catalogue."""
    root = tmp_path / "origin"
    build("dtd", root, per_class=3)
    published = find("dtd")
    listing = read_published(find_location(published, root))
    digests = {split: lines_digest(listing.lines(split)) for split in listing.splits}
    small = replace(published, counts=listing.counts, raw=replace(published.raw, split_digests=digests))
    monkeypatch.setattr(catalogue, "CATALOGUE", {**catalogue.CATALOGUE, "dtd": small})
    return root


@pytest.fixture
def hub(tmp_path, miniature, monkeypatch):
    """A server that lists dtd.zip and redirects to its content as the Hub does."""
    folder = tmp_path / "hub"
    archive = shutil.make_archive(str(folder / "cdn" / "dtd"), "zip", miniature, "dtd")
    content = Path(archive).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": digest, "size": len(content), "pointerSize": 134}
    entry = {"type": "file", "path": "dtd.zip", "size": len(content), "oid": "0" * 40, "lfs": lfs}
    (folder / TREE).parent.mkdir(parents=True)
    (folder / TREE).write_text(json.dumps([{"type": "directory", "path": "x", "oid": "0" * 40}, entry]))
    with LocalServer(folder) as server:
        server.always[f"/{FILES}/dtd.zip"] = Answer(status=302, to=f"{server.url}/cdn/dtd.zip")
        connect(server, monkeypatch)
        yield server


def connect(server, monkeypatch):
    """Set what $HF_ENDPOINT sets when the library is imported."""
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    settings = {"HF_HUB_OFFLINE": False, "ENDPOINT": server.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    for name, value in settings.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)


def fetch(capsys, tmp_path, *words, name="dtd"):
    return run(capsys, "data", "fetch", name, "--data", tmp_path / "data", *words)


@pytest.fixture
def gated_hub(tmp_path, monkeypatch):
    """A Hub with ImageNet's Parquet files, of few images, behind a redirect to a different server, and the origin."""
    build("imagenet", tmp_path / "origin", classes=2)
    images = tmp_path / "origin" / "imagenet" / "images"
    counts = {"train": len(list(images.glob("train/*/*.JPEG"))), "test": len(list(images.glob("val/*/*.JPEG")))}
    monkeypatch.setattr(
        catalogue, "CATALOGUE", {**catalogue.CATALOGUE, "imagenet": replace(find("imagenet"), counts=counts)}
    )
    folder, cdn = tmp_path / "hub", tmp_path / "cdn"
    tree, entries = folder / "api" / "datasets" / IMAGENET_REPOSITORY / "tree" / "main" / "data", []
    tree.parent.mkdir(parents=True)
    cdn.mkdir()
    with LocalServer(folder) as server, LocalServer(cdn) as content_server:
        for split, name in (("train", "train-00000-of-00001"), ("val", "validation-00000-of-00001")):
            files = sorted(images.glob(f"{split}/*/*.JPEG"), reverse=True)
            rows = [{"bytes": file.read_bytes(), "path": f"{file.stem}_{file.parent.name}.JPEG"} for file in files]
            labels = [imagenet_wnids().index(file.parent.name) for file in files]
            table = pyarrow.table({"image": rows, "label": labels})
            pyarrow.parquet.write_table(table, cdn / f"{name}.parquet")
            content = (cdn / f"{name}.parquet").read_bytes()
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            path = f"data/{name}.parquet"
            entries.append({"type": "file", "path": path, "size": len(content), "oid": "0" * 40, "lfs": lfs})
            to = f"{content_server.url.replace('127.0.0.1', 'localhost')}/{name}.parquet"
            server.always[f"/datasets/{IMAGENET_REPOSITORY}/resolve/main/{path}"] = Answer(status=302, to=to)
        tree.write_text(json.dumps(entries))
        connect(server, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server, content_server


def test_imagenet_is_fetched_with_the_token_of_the_user_which_only_the_hub_sees(gated_hub, tmp_path, capsys):
    server, content_server = gated_hub
    code, out, err = fetch(capsys, tmp_path, "--dry-run", name="imagenet")
    assert code == 0 and f"hf://{IMAGENET_REPOSITORY}" in out and "459.0 GB while it is packed" in out, err
    last = content_server.folder / "validation-00000-of-00001.parquet"
    part = work_folder(tmp_path / "data", "imagenet") / f"{last.name}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(last.read_bytes()[:5000])
    code, _, err = fetch(capsys, tmp_path, name="imagenet")
    assert code == 0, err
    assert server.headers["authorization"] == "Bearer hf_secret" and "authorization" not in content_server.headers
    assert content_server.headers["Range"] == "bytes=5000-"
    packed = read_manifest(tmp_path / "data" / "imagenet")
    assert packed == pack_source(available("imagenet", tmp_path / "origin"), tmp_path / "other")


@pytest.mark.parametrize(("path", "status"), [("tree", 401), ("train", 401), ("train", 403)])
def test_a_gate_that_is_closed_says_in_one_line_how_it_opens(gated_hub, tmp_path, capsys, path, status):
    server, _ = gated_hub
    prefix, name = f"datasets/{IMAGENET_REPOSITORY}", "data/train-00000-of-00001.parquet"
    path = f"/api/{prefix}/tree/main/data" if path == "tree" else f"/{prefix}/resolve/main/{name}"
    server.always[path] = Answer(status=status)
    code, _, err = fetch(capsys, tmp_path, name="imagenet")
    message = err.strip().splitlines()[-1]
    assert code == 1 and "accept the terms" in message and "hf auth login" in message and "hf_secret" not in err
    assert not (tmp_path / "data" / "imagenet").exists()


def test_labels_that_contradict_the_names_of_imagenet_are_an_error(tmp_path):
    rows = [{"bytes": b"", "path": "n01440764_1_n01440764.JPEG"}]
    pyarrow.parquet.write_table(pyarrow.table({"image": rows, "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet gives the image .* the label of n01443537"):
        unpack_parquet(tmp_path / "a.parquet", tmp_path)


def test_a_set_of_the_hub_is_fetched_verified_and_packed_as_from_raw_folders(hub, miniature, tmp_path, capsys):
    code, out, err = fetch(capsys, tmp_path, "--dry-run")
    assert code == 0 and "about 0.6 GB, 1.9 GB while it is packed\nNothing was downloaded." in out, err
    assert f"hf://{HUB_REPOSITORY}" in out and not hub.paths("") and not (tmp_path / "data").exists()
    code, out, err = fetch(capsys, tmp_path)
    assert code == 0, err
    packed = read_manifest(tmp_path / "data" / "dtd")
    assert packed == pack_source(available("dtd", miniature), tmp_path / "other")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["dtd"], "archives are deleted once they are packed"
    assert fetch(capsys, tmp_path)[0] == 0 and len(hub.paths("cdn/dtd.zip")) == 1, "a packed set is not fetched again"


@pytest.mark.parametrize(("length", "asked"), [(5000, "bytes=5000-"), (10**7, None)])
def test_an_interrupted_download_is_continued_by_the_next_command(hub, tmp_path, capsys, length, asked):
    """Unless more is there than the file has by now, which no server continues."""
    path = "/cdn/dtd.zip"
    hub.always[path] = Answer(status=503)
    code, _, err = fetch(capsys, tmp_path)
    assert code == 1 and "dtd.zip cannot be reached (the server answers 503)" in err
    assert not (tmp_path / "data" / "dtd").exists()
    # What a connection that has ended leaves.
    part = (hub.folder / path[1:]).read_bytes().ljust(length, b"x")[:length]
    (work_folder(tmp_path / "data", "dtd") / "dtd.zip.part").write_bytes(part)
    del hub.always[path]
    code, _, err = fetch(capsys, tmp_path)
    assert code == 0 and hub.headers.get("Range") == asked, err


def test_a_damaged_file_is_named_and_deleted_and_nothing_is_packed(hub, tmp_path, capsys):
    file = hub.folder / "cdn" / "dtd.zip"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + bytes(9))
    code, _, err = fetch(capsys, tmp_path)
    assert code == 1 and "dtd.zip" in err and "is not the expected file: its SHA256" in err
    assert not list((tmp_path / "data").rglob("*.zip*")) and not (tmp_path / "data" / "dtd").exists()
    file.write_bytes(whole)
    assert fetch(capsys, tmp_path)[0] == 0


def test_another_split_than_the_published_one_is_named_and_not_packed(hub, tmp_path, capsys, monkeypatch):
    small = find("dtd")
    other = replace(small, raw=replace(small.raw, split_digests={"test": "0" * 16}))
    monkeypatch.setattr(catalogue, "CATALOGUE", {**catalogue.CATALOGUE, "dtd": other})
    code, _, err = fetch(capsys, tmp_path)
    assert code == 1 and "split_zhou_DescribableTextures.json is not the published split" in err
    assert f"from {hub.url}/{FILES}/dtd.zip" in err and not (tmp_path / "data" / "dtd").exists()


def test_a_disk_without_room_is_an_error_before_the_download(hub, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, _, err = fetch(capsys, tmp_path)
    assert code == 1 and "GB free; name another --data folder" in err and not hub.paths(".zip")


UNPACKS = pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="needs Python 3.11.4")


@UNPACKS
@pytest.mark.parametrize("ranges", [True, False])
def test_official_archives_are_continued_or_begun_again_and_packed(miniature, tmp_path, capsys, monkeypatch, ranges):
    """The official DTD is a tar without the split file; some servers send every file from its start."""
    split_file = find("dtd").raw.split_file
    served = tmp_path / "served"
    served.mkdir()
    shutil.move(miniature / "dtd" / split_file, served / split_file)
    with tarfile.open(served / "dtd-r1.0.1.tar.gz", "w:gz") as tar:
        tar.add(miniature / "dtd", "dtd")
    md5 = hashlib.md5((served / "dtd-r1.0.1.tar.gz").read_bytes()).hexdigest()
    with LocalServer(served, ranges=ranges) as server:
        archives = (
            Archive(f"{server.url}/dtd-r1.0.1.tar.gz", "dtd-r1.0.1.tar.gz", md5=md5),
            Archive(f"{server.url}/{split_file}", split_file, into="dtd"),
        )
        small = find("dtd")
        official = replace(small, raw=replace(small.raw, archives=archives))
        monkeypatch.setattr(catalogue, "CATALOGUE", {**catalogue.CATALOGUE, "dtd": official})
        assert plan_fetch(official, {}).size == sum(file.stat().st_size for file in served.iterdir())
        server.answers["/dtd-r1.0.1.tar.gz"] = [Answer(), Answer(cut=5000)]
        (served / split_file).rename(served / "list")
        (served / split_file).write_text("<html>")
        code, _, err = fetch(capsys, tmp_path, "--official")
        assert code == 1 and f"{split_file} is damaged" in err
        (served / "list").rename(served / split_file)
        code, _, err = fetch(capsys, tmp_path, "--official")
        assert code == 0, err
    assert read_manifest(tmp_path / "data" / "dtd").counts == small.counts


@UNPACKS
def test_names_of_an_archive_stay_in_its_folder(tmp_path):
    (tmp_path / "evil").write_text("x")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "evil", "../outside")
    with pytest.raises(UserError, match=r"a\.tar is no whole archive .* it was deleted"):
        unpack(tmp_path / "a.tar", tmp_path / "in")
    assert not (tmp_path / "outside").exists()


def test_an_old_python_unpacks_no_archive_that_it_could_not_keep_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    tarfile.open(tmp_path / "a.tar", "w").close()
    with pytest.raises(UserError, match=r"a\.tar is not unpacked by Python .*; 3\.11\.4 or newer is needed"):
        unpack(tmp_path / "a.tar", tmp_path / "in")
    assert (tmp_path / "a.tar").exists()


def test_what_cannot_be_fetched_is_an_error_of_one_line(tmp_path, capsys):
    for words, message in (
        (("shapes",), "procap data pack shapes makes it"),
        (("stanford-cars", "--official"), "has no official archive"),
    ):
        code, _, err = run(capsys, "data", "fetch", *words, "--data", tmp_path / "data")
        assert code in (1, 2) and message in err and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("command", ["check --data", "pack paper --raw"])
def test_an_empty_folder_is_named_with_the_command_that_fills_it_in_one_line(tmp_path, capsys, command):
    (tmp_path / "empty").mkdir()
    code, out, err = run(capsys, "data", *command.split(), tmp_path / "empty")
    assert code in (1, 2) and not out and len(err.splitlines()) == 1 and "procap data fetch paper" in err


def test_a_plan_needs_no_network(tmp_path, capsys, monkeypatch):
    with LocalServer(tmp_path) as server:
        connect(server, monkeypatch)
    code, out, err = run(capsys, "data", "fetch", "paper,ImageNet", "--dry-run", "--data", tmp_path / "data")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and len(lines) == 19 and f"packed into {tmp_path / 'data' / 'NAME'}: about 215.5 GB" in out, err
    assert "$HF_TOKEN" in lines["imagenet"] and "non-commercial" in lines["imagenet"]
    assert f"hf://{HUB_REPOSITORY}/dtd.zip" in lines["dtd"] and "0.63 GB" in lines["dtd"]
    assert "unknown" in lines["ucf101"] and "and 1 set of unknown size" in out
    _, out, _ = run(capsys, "data", "fetch", "dtd", "--dry-run", "--data", tmp_path / "data", "--json")
    assert json.loads(out)["fetched"]["dtd"]["gigabytes"] == 0.63


@pytest.mark.parametrize(("names", "expected"), [
    (["imagenet,dtd"], {"imagenet", "dtd"}), (["ImageNet", "dtd"], {"imagenet", "dtd"}), (["dtd", "Paper"], 14),
])  # fmt: skip
def test_imagenet_is_left_out_of_the_group_alone(names, expected):
    chosen = {dataset.name for dataset in select_published(names)}
    assert (chosen == expected) if isinstance(expected, set) else (len(chosen) == expected and "imagenet" not in chosen)
