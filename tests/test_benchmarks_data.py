"""`procap data` on published layouts and own data: from folders to a trained table."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from command_line import run
from miniature_roots import available, build, build_all
from own_images import CLASSES, put, put_classes, put_photographs
from report_pages import begin, put_entry

from benchmarks.cli import main
from benchmarks.experiment.profiles import MINI, PAPER
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from shards.catalogue import PUBLISHED
from shards.pack import pack_source
from shards.raw.user_dataset import user_source
from shards.reader import open_dataset
from shards.resolve import packed_names

ROOT = Path(__file__).resolve().parents[1]
RAW_SETS = PUBLISHED
pytestmark = pytest.mark.usefixtures("at_home")


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    return build_all(tmp_path_factory.mktemp("raw"), per_class=4, classes=4)


@pytest.fixture(scope="module")
def packed(raw, tmp_path_factory) -> Path:
    data, before = tmp_path_factory.mktemp("packed"), contents(raw)
    for dataset in RAW_SETS:
        pack_source(available(dataset.name, raw), data)
    assert contents(raw) == before, "raw folders are only read"
    return data


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_all_published_sets_are_packed_from_raw_folders(packed, capsys):
    names = [dataset.name for dataset in RAW_SETS]
    assert packed_names(packed) == sorted(names)
    code, out, err = run(capsys, "data", "check", "--data", packed)
    assert code == 0 and all(name in out for name in names), err


def test_train_evaluate_and_table_on_published_layouts(packed, tmp_path, capsys):
    """Half of the classes of one set, all of another, and a set that has test images only."""
    at = ["--data", packed, "--results", tmp_path / "results", "--tracking", "off"]
    common = ["--methods", "coop", "--epochs", "1", "--shots", "2", "--batch-size", "4"]
    for extra in (["--datasets", "oxford-pets"], ["--datasets", "eurosat", "--classes", "all"]):
        code, _, err = run(capsys, "train", *common, *extra, *at)
        assert code == 0, err
    code, _, err = run(capsys, "eval", *common, "--datasets", "oxford-pets", *at)
    assert code == 0, err
    targets = "eurosat,imagenet-r,UCF101"
    code, _, err = run(capsys, "eval", *common, *extra, "--targets", targets, *at)
    assert code == 0, err
    code, out, err = run(capsys, "table", "--results", tmp_path / "results")
    assert code == 0 and "oxford-pets" in out


def test_own_data_by_one_yaml_file(raw, tmp_path, capsys):
    shutil.copytree(raw / "eurosat" / "2750", tmp_path / "fields")
    (tmp_path / "land.yaml").write_text(
        "name: my-land\ntemplate: a satellite photo of {}.\nfolder: fields\n"
        "split: {train: 0.5, val: 0.2, test: 0.3, seed: 1}\n"
    )
    at = ["--data", tmp_path / "data"]
    code, _, err = run(capsys, "data", "pack", "land.yaml", *at)
    assert code == 0, err
    run_it = ["--methods", "zeroshot", "--datasets", "my-land", *at, "--tracking", "off"]
    assert run(capsys, "train", *run_it)[0] == 0 and run(capsys, "eval", *run_it)[0] == 0
    code, out, _ = run(capsys, "table")
    assert code == 0 and "my-land" in out
    code, out, _ = run(capsys, "ls", "datasets", *at)
    assert code == 0 and "my-land" in out
    code, out, _ = run(capsys, "data", "show", "my-land", *at)
    assert code == 0 and "a satellite photo of {}" in out and "AnnualCrop" in out


def test_own_photographs_are_told_apart_with_the_defaults(tmp_path, capsys):
    put_photographs(tmp_path / "photos")
    code, _, err = run(capsys, "data", "pack", "photos", "--data", "shards")
    assert code == 0 and "prompts cannot tell 5 of 6 classes" in err and "procap ls words" in err
    at = ["--datasets", "photos", "--classes", "all", "--shots", "8", "--data", "shards", "--tracking", "off"]
    assert run(capsys, "train", *at)[0] == 0
    code, out, err = run(capsys, "eval", *at, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["evaluated"][0]["accuracy"] > 80, err
    assert err.splitlines()[-1] == "next: procap table; procap report"


@pytest.mark.parametrize(("name", "trains"), [("digits", True), ("photos", True), ("unknown.yaml", False)])
def test_the_training_that_packing_proposes_can_be_planned(name, trains, tmp_path, capsys):
    put_classes(tmp_path / "photos")
    (tmp_path / "unknown.yaml").write_text("name: unknown\ntemplate: a {}.\nfolder: photos\nclasses: none\n")
    err = run(capsys, "data", "pack", name, "--data", "shards")[2]
    proposed = re.search("procap (train .*)", err)
    assert "next: procap data show" in err and bool(proposed) == trains
    assert not proposed or run(capsys, *proposed[1].split(), "--dry-run")[0] == 0


WRONG = [
    (["pack", "caltech101"], 2, "--raw"),
    (["pack", "caltech101", "--raw", "nowhere"], 2, "'nowhere' does not exist"),
    (["pack", "caltech"], 2, "did you mean caltech101"),
    (["pack", "imagenet", "--raw", "RAW"], 1, "published"),
    (["pack", "shapes", "--data", "https://127.0.0.1:9/shards"], 2, "can only be read"),
    (["pack", "missing.yaml"], 1, "missing.yaml"),
    (["pack", "/wrong/path"], 2, "there is no folder /wrong/path"),
    (["pack", "IMG.JPG"], 2, "there is no folder IMG.JPG"),
    (["pack", "digits", "--skip-broken"], 2, "'digits' is of the catalogue"),
    (["show", "caltech101"], 1, "no shards of 'caltech101'"),
]


@pytest.mark.parametrize(
    ("line", "code", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_input_is_an_error_of_one_line(capsys, raw, line, code, message):
    words = [word.replace("RAW", str(raw)) for word in line]
    got, _, err = run(capsys, "data", *words)
    assert got == code, err
    assert len(err.strip().splitlines()) == 1 and message in err, err


def test_the_data_page_names_every_raw_folder_and_list():
    page = (ROOT / "docs" / "data.md").read_text()
    for dataset in RAW_SETS:
        assert dataset.raw
        row = next(line for line in page.splitlines() if line.startswith(f"| `{dataset.name}` "))
        assert f"`{dataset.raw.folders[0]}/" in row and dataset.raw.split_file in row
        assert dataset.raw.images[0].strip(".") in row


def test_one_set_that_fails_does_not_stop_the_others(tmp_path, capsys):
    build("dtd", tmp_path / "raw", 3, 2)
    words = ("data", "pack", "dtd", "digits", "--raw", tmp_path / "raw", "--data", tmp_path / "data")
    code, out, err = run(capsys, *words)
    assert code == 3 and "digits" in out and "'dtd': split_zhou_DescribableTextures.json is not the published" in err
    assert packed_names(tmp_path / "data") == ["digits"]


def test_a_broken_set_is_packed_again_from_its_source(raw, packed, tmp_path, capsys):
    shutil.copytree(packed / "dtd", tmp_path / "data" / "dtd")
    (tmp_path / "land.yaml").write_text(f"name: my-land\ntemplate: a {{}}.\nfolder: {raw}/eurosat/2750\nsplit: test\n")
    at = ["--data", tmp_path / "data"]
    assert run(capsys, "data", "pack", "land.yaml", "digits", *at)[0] == 0
    for name in ("dtd", "my-land", "digits"):
        (tmp_path / "data" / name / "test" / "0.tar").write_bytes(b"")
    code, _, err = run(capsys, "data", "check", *at)
    assert code == 1
    for name in ("digits", "dtd", "my-land"):
        assert f"to repair '{name}', pack it again: procap data pack {name} --force --data {tmp_path}/data\n" in err
    for command in (["digits"], ["land.yaml"]):
        assert run(capsys, "data", "pack", *command, "--force", *at)[0] == 0
    assert run(capsys, "data", "check", "digits", "my-land", *at)[0] == 0


def put_dirt(images: Path) -> None:
    """Put files of operating systems, notes, a hidden image, equal images and broken ones among class folders."""
    for file in ("Thumbs.db", "notes.txt", "Ara/Thumbs.db", "Ara/notes.txt", ".DS_Store", "Ara/._00.png"):
        (images / file).write_bytes(b"x")
    put(images / "loose.png")
    for name in ("bee_eater/copy.png", "Ara/copy.png"):
        (images / name).write_bytes((images / "Ara" / "00.png").read_bytes())


def test_a_folder_without_yaml_file_is_packed_and_everything_left_out_is_counted(tmp_path, capsys):
    images, at = tmp_path / "My Birds", ("--data", tmp_path / "data", "--workers", "1")
    put_classes(images)
    put_dirt(images)
    code, out, err = run(capsys, "data", "pack", images, "--dry-run", "--json", *at)
    assert code == 0 and re.search("my-birds +to be packed", err) and not (tmp_path / "My Birds.yaml").exists()
    assert json.loads(out)["datasets"] == {"my-birds": "to be packed"}
    code, out, err = run(capsys, "data", "pack", images, *at)
    assert code == 0, err
    assert re.search(r"Zebra finch +5 +2 +3\n", out) and re.search(r"my-birds +4 +42", out)
    assert "procap: note: left out: 5 files: 'Ara/Thumbs.db', 'Ara/notes.txt', 'Thumbs.db' and 2 more" in err
    assert "byte for byte" in err
    written, source = tmp_path / "My Birds.yaml", open_dataset(tmp_path / "data", "my-birds").manifest.source
    assert source == user_source(written).origin
    written.write_text(written.read_text().replace("a photo of a {}.", "a drawing of a {}."))
    code, _, err = run(capsys, "data", "pack", images, *at)
    assert code == 0
    assert open_dataset(tmp_path / "data", "my-birds").manifest.template == "a drawing of a {}."
    (images / "Ara" / "copy.png").write_bytes((images / "Ara" / "01.png").read_bytes())
    (images / "Ara" / "new.png").write_bytes((images / "bee_eater" / "01.png").read_bytes())
    assert re.search(r"my-birds +4 +43", run(capsys, "data", "pack", images, *at)[1])
    written.write_text(written.read_text().replace("folder: My Birds", "folder: elsewhere"))
    code, _, err = run(capsys, "data", "pack", images, *at)
    assert code == 2 and f"{written} is there already and describes other images" in err


def test_all_findings_are_listed_at_once(tmp_path, capsys):
    images = tmp_path / "birds"
    put_classes(images)
    for names, each in ((("coal_tit", "Zebra finnch"), 1), (("magpie", "magpies", "magpei"), 8)):
        put_classes(images, names, each=each)
    (images / "emu").mkdir()
    (images / "Ara" / "cut.png").write_bytes((images / "Ara" / "00.png").read_bytes()[:40])
    (images / "Ara" / "page.jpg").write_text("<html>")
    (images / "Ara" / "copy.png").write_bytes((images / "Ara" / "00.png").read_bytes())
    code, _, err = run(capsys, "data", "pack", f"{images}/", "--workers", "1", "--data", tmp_path / "data")
    assert code == 1 and not (tmp_path / "data" / "birds").exists() and (tmp_path / "birds.yaml").exists()
    small = "class 'coal_tit' has no train image: add some", "class 'Zebra finnch' has no train image"
    broken = "Ara/cut.png is not a readable image", "Ara/page.jpg is not a readable image"
    for words in ("birds/emu holds no image: remove the folder", *small, *broken):
        assert f"procap: problem: {words}" in re.sub(f"folder: {tmp_path}/|(train|val|test): ", "", err)
    assert "byte for byte, of images in " in err and "Ara/copy.png = Ara/00.png" in err


def test_unreadable_images_are_left_out_listed_and_recorded_on_request(tmp_path, capsys):
    put_classes(tmp_path / "birds")
    (tmp_path / "birds" / "Ara" / "cut.png").write_bytes((tmp_path / "birds/Ara/00.png").read_bytes()[:40])
    (tmp_path / "birds" / "Ara" / "page.jpg").write_text("<html>")
    words = ("data", "pack", f"{tmp_path}/birds/", "--data", tmp_path / "data", "--workers", "1")
    code, _, err = run(capsys, *words)
    assert code == 1 and "with --skip-broken" in err
    code, _, err = run(capsys, *words, "--skip-broken")
    assert code == 0 and all(f"left out, not readable: Ara/{name}" in err for name in ("cut.png", "page.jpg"))
    manifest = open_dataset(tmp_path / "data", "birds").manifest
    assert manifest.images == 40 and "without 2 unreadable images: Ara/cut.png, Ara/page.jpg" in manifest.source
    for path in (tmp_path / "birds" / "Ara").glob("[!cp]*"):
        path.write_bytes(b"")
    code, _, err = run(capsys, *words, "--skip-broken")
    assert code == 1 and "class 'Ara' has no test image" in err
    code, _, err = run(capsys, "data", "pack", "tiles", "--data", tmp_path / "data", "--skip-broken")
    assert code == 2 and "'tiles' is of the catalogue and has a fixed list" in err


def test_equal_images_in_train_and_test_are_a_warning_with_their_number(tmp_path, capsys, monkeypatch):
    for split in ("train", "test"):
        put_classes(tmp_path / "birds" / split, each=2)
    put(tmp_path / "birds" / "test" / "Ara" / "02.png", (77, 7, 7))
    for split, blue in (("train", 8), ("test", 9)):
        put(tmp_path / "birds" / split / "emu" / "00.png", (77, 7, blue))
    monkeypatch.chdir(tmp_path)
    at = ("./birds", "--data", tmp_path / "data", "--workers", "1")
    code, _, err = run(capsys, "data", "pack", *at)
    assert code == 0, err
    assert "warning: test: 8 images are copies, byte for byte, of images in train (test/Ara/00.png = train/" in err
    put(tmp_path / "birds" / "train" / "emu" / "copy.png", (77, 7, 8))
    assert "train: 1 image is a copy, byte for byte, of images in train" in run(capsys, "data", "pack", *at)[2]
    (tmp_path / "birds/train/Ara/cut.png").write_bytes(b"x")
    err = run(capsys, "data", "pack", *at)[2]
    assert "Ara/cut.png is not a readable image" in err and "test: 8 images are copies" in err


def test_a_folder_without_an_image_that_is_read_says_what_it_has(tmp_path, capsys):
    for name in CLASSES:
        put(tmp_path / "birds" / name / "0.ppm")
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    assert code == 1 and "birds holds no image that is read; left out: 4 files" in err and "(4 ppm)" in err


def test_leavings_of_systems_are_named_and_not_packed(tmp_path, capsys):
    put_classes(tmp_path / "birds", each=10)
    put_classes(tmp_path / "birds", ["Ara/@eaDir", "Ara/_thumb", "#recycle", "lost+found", "Ara/.thumbnails"], each=3)
    code, out, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    assert code == 0 and re.search(r"birds +4 +40 ", out), out
    assert "not packed, because systems leave such folders: '#recycle', 'Ara/@eaDir', 'Ara/_thumb' and 1 more" in err


def test_files_that_cannot_be_read_are_listed_at_once_and_left_out_on_request(tmp_path, capsys):
    put_classes(tmp_path / "birds", each=11)
    for name in ("Ara/00.png", "bee_eater/01.png"):
        (tmp_path / "birds" / name).unlink()
    (tmp_path / "birds/Ara/00.png").symlink_to("/nowhere/object")
    (tmp_path / "birds/Ara/batch").symlink_to("/nowhere/batch")
    os.mkfifo(tmp_path / "birds/bee_eater/01.png")
    words = ("data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    code, _, err = run(capsys, *words)
    left_out = ("Ara/00.png", "Ara/batch", "bee_eater/01.png")
    assert code == 1 and all(f"{name} is not a readable image (" in err for name in left_out), err
    code, out, err = run(capsys, *words, "--skip-broken")
    assert code == 0 and re.search(r"birds +4 +42 ", out), err
    assert all(f"left out, not readable: {name}" in err for name in left_out)


def test_half_of_a_folder_left_out_is_a_warning(tmp_path, capsys):
    put_classes(tmp_path / "birds", each=4)
    for i in range(4):
        put(tmp_path / "birds" / "Ara" / f"{i}.heic")
    assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[0] == 0
    err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[2]
    assert "warning: left out: 4 files" in err and "(4 heic); HEIC is not read" in err


def test_images_on_a_disk_that_cannot_be_written_are_packed_twice(tmp_path, capsys, monkeypatch):
    put_classes(tmp_path / "input" / "birds", each=4)
    monkeypatch.chdir(tmp_path)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "input" not in str(path) and access(path, mode))
    for _ in range(2):
        code, _, err = run(capsys, "data", "pack", "input/birds", "--data", "data")
        assert code == 0 and [*tmp_path.rglob("*.yaml")] == [tmp_path / "birds.yaml"], err


def test_the_same_images_are_not_taken_for_those_of_another_folder_without_their_yaml_file(tmp_path, capsys):
    put_classes(tmp_path / "birds", each=4)
    for _ in range(2):
        assert run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")[0] == 0
        (tmp_path / "birds.yaml").unlink()


def test_a_folder_called_like_a_data_set_is_pointed_out(tmp_path, capsys, monkeypatch):
    put_classes(tmp_path / "Digits", each=4)
    monkeypatch.chdir(tmp_path)
    assert "pack the folder here as ./Digits" in run(capsys, "data", "pack", "Digits", "--data", "data")[2]


@pytest.mark.parametrize(("folder", "name"), [
    ("a,b", "a-b"), ("paper", "my-paper"), ("All", "my-all"), ("unlabelled", "my-unlabelled"),
    ("birds..v2", "birds-v2"), ("dtd.yaml", "dtd-yaml"), (f"{'b' * 59}.2024", 'b' * 59),
])  # fmt: skip
def test_a_folder_of_any_name_gets_a_name_that_is_free_and_valid(tmp_path, capsys, monkeypatch, folder, name):
    put_classes(tmp_path / folder, each=4)
    monkeypatch.chdir(tmp_path)
    for path in (f"./{folder}", f"{folder}.yaml"):
        code, _, err = run(capsys, "data", "pack", path, "--data", "data")
        assert code == 0 and packed_names(Path("data")) == [name], err


@pytest.mark.parametrize(("names", "words"), [
    (("red_ring", "red ring"), "classes have equal prompts ('red ring' = 'red_ring')"),
    (("Blue star", "blue star"), "('Blue star' = 'blue star')"),
    (("red ring", "red\u00a0ring"), "('red ring' = 'red\\xa0ring')"),
    (("redring", "red\u200bring"), "('redring' = 'red\\u200bring')"),
    (("1", "12"), "class names are numbers or WordNet ids ('1', '12')"),
])  # fmt: skip
def test_names_that_prompts_cannot_tell_apart_are_a_warning(tmp_path, capsys, names, words):
    put_classes(tmp_path / "birds", names, each=4)
    code, _, err = run(capsys, "data", "pack", tmp_path / "birds", "--data", tmp_path / "data")
    assert code == 0 and "warning: class" in err and words in err
    assert names[0] != "1" or "ViT-B/16" not in err


def test_a_published_set_of_different_images_is_packed_again(tmp_path):
    build("dtd", tmp_path / "raw", 4, 2)
    first = pack_source(available("dtd", tmp_path / "raw"), tmp_path / "data")
    assert pack_source(available("dtd", tmp_path / "raw"), tmp_path / "data") == first
    for file in (tmp_path / "raw").rglob("*.jpg"):
        put(file, (9, 9, 9))
    again = pack_source(available("dtd", tmp_path / "raw"), tmp_path / "data")
    assert again.source == first.source and again != first


@pytest.fixture(scope="module")
def one_class(tmp_path_factory) -> Path:
    """A data root with own sets of one, three and four classes, and one with test images only."""
    root = tmp_path_factory.mktemp("own")
    for name, count in (("solo", 1), ("trio", 3), ("quartet", 4)):
        put_classes(root / name, CLASSES[:count], each=6)
        put_classes(root / name, CLASSES[: name == "trio"], each=14)
        (root / "solo.yaml").write_text("name: solo\ntemplate: a {}.\nfolder: solo\nsplit: {train: 0.5, test: 0.5}\n")
        assert main(["data", "pack", str(root / name), "--data", str(root / "data"), "--workers", "1"]) == 0
    (root / "tested.yaml").write_text("name: tested\ntemplate: a {}.\nfolder: trio\nsplit: test\n")
    assert main(["data", "pack", str(root / "tested.yaml"), "--data", str(root / "data"), "--workers", "1"]) == 0
    return root / "data"


@pytest.mark.parametrize(("line", "code", "words"), [
    ("train --methods coop --datasets solo", 2, "'solo' has one class ('Zebra finch'): there is nothing to tell apart"),
    ("bench base-to-novel --datasets trio", 2, "cannot run: 'trio' has fewer than 2 classes in its part novel"),
    ("bench cross-dataset --datasets solo --dry-run", 2, "'solo' has fewer than 2 classes in its part all"),
    ("bench all --datasets solo", 2, "no suite can run: "),
])  # fmt: skip
def test_too_few_classes_are_refused_with_the_reason(one_class, tmp_path, capsys, line, code, words):
    at = ["--data", str(one_class), "--results", str(tmp_path), "--tracking", "off"]
    at += ["--profile", "mini"] if "bench" in line else ["--epochs", "1"]
    assert main([*line.split(), *at]) == code and words in (err := capsys.readouterr().err) and "[1/1]" not in err
    assert not list(tmp_path.rglob("train.json"))


def test_zero_shot_clip_is_evaluated_without_training_on_the_classes_that_there_are(one_class, tmp_path, capsys):
    at = ["--data", str(one_class), "--results", str(tmp_path), "--tracking", "off", "--seeds", "1,2"]
    assert main(["eval", "--methods", "zeroshot", "--datasets", "trio,solo,tested", *at]) == 0
    out = capsys.readouterr().out
    assert all(f"{target}:test" in out for target in ("trio:base", "solo:all", "tested:all")) and "novel" not in out
    own = ["eval", "--methods", "zeroshot", "--datasets", "trio", *at, "--targets"]
    assert main([*own, "solo:novel,trio:all,trio:novel"]) == 3
    out, err = capsys.readouterr()
    assert err.count("trio:novel:test has one class, so that every image counts as right") == 1
    assert out.count("trio:all:test") == 2 and "'solo' has no image of novel classes" in err
    assert main(["eval", "--methods", "zeroshot", "--datasets", "quartet", *at, "--targets", "quartet:all"]) == 0
    assert main(["ls", "runs", "--results", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"zeroshot +solo +100\.00 +- +- ", listed)
    assert re.search(r"zeroshot +quartet +- +- +- ", listed), "all classes are not both halves"
    assert main([*own, "solo:novel"]) == 1
    assert "'solo' has no image of novel classes" in capsys.readouterr().err


@pytest.mark.usefixtures("blank_figures")
def test_all_suites_run_on_an_own_set_alone_without_those_that_cannot(one_class, tmp_path, capsys):
    at = ["--data", str(one_class), "--results", str(tmp_path)]
    one = ["--methods", "zeroshot", "--profile", "mini", "--shots", "2", "--quick", "--dry-run"]
    assert main(["bench", "all", "--datasets", "quartet", *one, *at]) == 0
    out, err = capsys.readouterr()
    assert "quartet:base:test" in out and not re.search("shapes|tiles|digits", out)
    for name in ("cross-dataset", "domain-generalization"):
        assert f"{name} is left out: it needs data sets besides 'quartet'" in err
    assert main(["ls", "datasets", "--data", str(one_class)]) == 0
    assert re.search(r"quartet +4 +12/4/8 +yes +packed from: own folders\n", capsys.readouterr().out)
    put_entry(tmp_path, *begin(tmp_path, "base-to-novel", methods=one[1:2], datasets=("quartet",), data=one_class)[1])
    assert main(["report", *at, "--out", str(tmp_path / "page")]) == 0


def test_suites_on_own_data_leave_out_methods_whose_names_mini_does_not_know(one_class, tmp_path, capsys):
    at = ["--datasets", "quartet", "--data", one_class, "--results", tmp_path, "--shots", "2", "--dry-run"]
    for words, methods, parts in [
        ("bench all --profile mini --quick", {"probe", "ncm"}, "stability, ablation, prompt-length"),
        ("bench few-shot", {"probe", "ncm"}, ""),
        ("train --classes all", {"probe"}, ""),
    ]:
        code, out, err = run(capsys, *words.split(), *at)
        assert code == 0 and {line.split("/")[2] for line in out.splitlines() if "/quartet/" in line} == methods
        assert err.count("are left out on your data; to have them, name a CLIP that knows yours") == 1
        assert not parts or re.search(f"{parts}, .* are left out: no method reads images alone", err)
    code, _, err = run(capsys, "bench", "ablation", *at)
    assert code == 2 and "ablation cannot run: no method reads images alone" in err
    code, _, err = run(capsys, "bench", "runtime", *at[:6], "--dry-run")
    assert code == 0 and "left out" not in err
    # Options are of the methods that run.
    code, out, err = run(capsys, "bench", "few-shot", "--option", "probe.strength=10", *at)
    assert code == 0 and "/probe/" in out
    code, _, err = run(capsys, "bench", "few-shot", "--option", "n_ctx=8", *at)
    assert code == 2 and "n_ctx" in err
    code, out, err = run(capsys, "bench", "few-shot", "--methods", "coop", *at)
    assert code == 0 and "/coop/" in out and "left out" not in err


@pytest.mark.parametrize("profile", [MINI, PAPER])
@pytest.mark.parametrize(("datasets", "reason"), [
    (("quartet",), "they use own data sets"),
    (("tiles", "digits"), "they use generated data sets"),
    (("quartet", "tiles"), "they use generated and own data sets"),
    (("dtd", "quartet"), ""),
])  # fmt: skip
def test_what_compares_with_published_numbers_depends_on_the_data_set(one_class, tmp_path, profile, datasets, reason):
    suite = load_suite("base-to-novel")
    options = suite.options(profile, datasets=datasets, methods=("zeroshot",), data=one_class)
    results = SuiteResults.read(suite, options, tmp_path)
    if reason:
        assert results.why_incomparable == reason and not results.in_paper
    else:
        assert ("the backbone is mini" in results.why_incomparable) == (profile is MINI)
