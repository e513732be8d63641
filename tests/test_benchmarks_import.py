"""A trained run used elsewhere: by public code and back, and to classify new images."""

import csv
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import mark_slow
from tiny_geometry import SHORT_OPTIONS

from benchmarks import results
from benchmarks.cli import main
from procap.errors import UsageError
from procap.methods import METHODS, method_class
from runner.config import Target
from runner.predict import ImageClassifier
from runner.run_folders import RunFolder, find_runs
from shards import image_selection, reader

PUBLIC = [name for name in METHODS if method_class(name).public_layout]
FILES = {"dassl": "model.pth.tar-1", "safetensors": "model.safetensors"}
pytestmark = pytest.mark.usefixtures("at_home")


def small_run(data: Path, checkpoint: Path) -> list[str]:
    run = ["--method", "maple", "--datasets", "digits", "--shots", "2", "--epochs", "1", "--option", "depth=2"]
    return [*run, "--backbone", str(checkpoint), "--data", str(data), "--tracking", "off"]


@pytest.fixture
def flags(few_digits, tiny_checkpoint) -> list[str]:
    return small_run(few_digits, tiny_checkpoint)


def only_run(folder: str | Path, flags: Sequence[str] = ()) -> RunFolder:
    """The run below a folder, which may have one of the first stage of the method in `flags` as well."""
    runs = find_runs(Path(folder))
    [run] = [run for run in runs if run.path.parts[-4] in flags] or runs
    return run


def counts(run: RunFolder) -> dict[str, tuple[int, list[int]]]:
    return {one.target: (one.correct, one.per_class.correct) for one in run.read_evaluations()}


def train_and_import(flags: list[str], *formats: str) -> RunFolder:
    """Train, evaluate, export, import and evaluate a run, whose counts and checkpoint stay the same; returns it."""
    assert main(["train", *flags, "--results", "ours"]) == 0
    assert main(["eval", *flags, "--results", "ours"]) == 0
    ours = only_run("ours", flags)
    for format in formats:
        assert main(["export", str(ours.path), "--format", format]) == 0
        [file] = (Path("export") / ours.path.relative_to("ours")).glob(f"*/{FILES[format]}")
        assert file.is_file() and main(["import", str(file), *flags, "--results", format]) == 0
        assert main(["eval", *flags, "--results", format]) == 0
        imported = only_run(format)
        training = imported.read_training()
        assert imported.path.name == ours.path.name
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        assert training.imported.model_dump() == {"name": file.name, "sha256": sha256, "epoch": 1}
        assert counts(imported) == counts(ours)
        # An imported run has no features of its teacher, which it asks instead.
        if "promptkd" not in flags:
            assert imported.checkpoint_file.read_bytes() == ours.checkpoint_file.read_bytes()
    return ours


OPTIONS = {**SHORT_OPTIONS, "coprompt": {"depth": 2, "sentences": "templates"}, "mmrl": {"first_block": 1, "width": 16}}


@pytest.mark.parametrize("method", mark_slow(PUBLIC))
def test_a_run_of_every_method_with_public_code_goes_out_and_comes_back(method, few_digits, short_checkpoint):
    flags = ["--method", method, "--datasets", "digits", "--shots", "1", "--epochs", "1", "--batch-size", "5"]
    teacher = {"teacher": short_checkpoint} if method_class(method).required_option == "teacher" else {}
    options = [f"--option={name}={value}" for name, value in (OPTIONS.get(method, {}) | teacher).items()]
    where = ["--backbone", str(short_checkpoint), "--data", str(few_digits), "--tracking", "off"]
    is_dassl = method_class(method).public_layout.dassl
    form = "dassl" if is_dassl else "safetensors"
    run = train_and_import([*flags, "--recipe-field", "warmup=none", *options, *where], form)
    assert main(["export", str(run.path), "--out", "again"]) == (0 if is_dassl else 1)


def test_a_run_goes_out_in_both_formats_and_tables_mark_it(capsys, flags):
    ours = train_and_import(flags, *FILES)
    assert (Path("export") / ours.path.relative_to("ours") / "MultiModalPromptLearner").is_dir()
    assert results.load("dassl").imported.all() and not results.load("ours").imported.any()
    capsys.readouterr()
    assert main(["table", "--results", "dassl"]) == 0
    assert "IMPORTED: 1 run of MaPLe." in capsys.readouterr().out
    assert main(["ls", "runs", "--results", "dassl", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert listed["state"] == "finished" and listed["imported"]


def learned(n_ctx: int = 2) -> dict[str, torch.Tensor]:
    """What MaPLe's trainer learns at depth 2."""
    state = {"prompt_learner.ctx": torch.ones(n_ctx, 64), "prompt_learner.compound_prompts_text.0": torch.ones(2, 64)}
    for name in ("proj", "compound_prompt_projections.0"):
        state |= {f"prompt_learner.{name}.weight": torch.ones(128, 64), f"prompt_learner.{name}.bias": torch.ones(128)}
    return state


def test_wrong_imports_are_one_line_each_and_write_nothing(capsys, flags, tmp_path):
    def fail(file: str, *more: str) -> str:
        capsys.readouterr()
        assert main(["import", file, *flags, *more]) in (1, 2)
        return capsys.readouterr().err.splitlines()[-1]

    def save(name: str, **content: object) -> str:
        torch.save(content, tmp_path / name)
        return str(tmp_path / name)

    good = save("good", state_dict={f"module.{name}": tensor for name, tensor in learned().items()}, epoch=1)
    assert "nowhere is refused: it is not there" in fail("nowhere")
    assert "prompt_learner.ctx is [4, 64], expected [2, 64]" in fail(save("long", state_dict=learned(4), epoch=1))
    broken = learned() | {"prompt_learner.ctx": torch.full((2, 64), float("nan"))}
    assert fail(save("broken", state_dict=broken, epoch=1)).endswith(
        "context is not finite in the file, whose training has diverged: import another one"
    )
    assert "write {dataset} and {seed} into its path" in fail(good, "--seeds", "1,2")
    assert "unknown task 'few-shots': did you mean few-shot" in fail(good, "--task", "few-shots")
    assert not list(Path("results").rglob("*.json"))

    assert main(["import", good, *flags]) == 0
    run = only_run("results")
    before = run.train_file.read_bytes()
    assert main(["import", good, *flags]) == 0 and run.train_file.read_bytes() == before
    other = save("other", state_dict=learned() | {"prompt_learner.ctx": torch.zeros(2, 64)}, epoch=1)
    assert "is a run already" in fail(other) and main(["import", other, *flags, "--force"]) == 0
    assert run.read_training().imported.name == "other"


def test_each_run_takes_its_own_file(capsys, flags, tmp_path):
    for seed in (1, 2):
        torch.save({"state_dict": learned(), "epoch": 3}, tmp_path / f"digits-{seed}.tar")
    path = str(tmp_path / "{dataset}-{seed}.tar")
    assert main(["import", path, *flags, "--seeds", "1,2", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["files"]
    assert [*planned.values()] == [path.format(dataset="digits", seed=seed) for seed in (1, 2)]
    assert not Path("results").exists()
    with pytest.warns(UserWarning, match="was trained for 3 epochs and the recipe"):
        assert main(["import", path, *flags, "--seeds", "1,2"]) == 0
    assert {run.read_training().imported.name for run in find_runs(Path("results"))} == {"digits-1.tar", "digits-2.tar"}


def test_a_method_without_public_code_is_not_exported(capsys, flags):
    zeroshot = [word for word in flags if word not in ("--option", "depth=2", "--epochs", "1")]
    zeroshot[1] = "zeroshot"
    assert main(["train", *zeroshot]) == 0
    capsys.readouterr()
    assert main(["export", str(only_run("results").path)]) == 1
    assert "checkpoints of ZeroShot's public code are not supported" in capsys.readouterr().err
    assert main(["export", "nowhere", "--format", "onnx"]) == 2


@pytest.fixture(scope="module")
def run(few_digits, tiny_checkpoint, tmp_path_factory) -> RunFolder:
    """A small run of MaPLe on base classes, with its evaluation."""
    folder = tmp_path_factory.mktemp("predict") / "results"
    for command in ("train", "eval"):
        assert main([command, *small_run(few_digits, tiny_checkpoint), "--results", str(folder)]) == 0
    return only_run(folder)


@pytest.fixture(scope="module")
def photos(few_digits, tmp_path_factory) -> Path:
    """The test images of the base classes in a folder, in their order, beside files that are no images."""
    folder = tmp_path_factory.mktemp("photos")
    selection = image_selection.select_target_images(reader.open_dataset(few_digits, "digits"), "base")
    for i in range(len(selection.images)):
        selection.images.image(i).save(folder / f"{i:04d}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image")
    return folder


def predict(capsys, *words: object) -> list[dict[str, str]]:
    capsys.readouterr()
    assert main(["predict", *map(str, words)]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_images_of_a_folder_get_the_labels_that_the_evaluation_counted(run, photos, few_digits, capsys):
    rows = predict(capsys, run.path, photos)
    selection = image_selection.select_target_images(reader.open_dataset(few_digits, "digits"), "base")
    truth = [selection.classnames[label].replace("_", " ") for label in selection.images.labels]
    right = [row["label"] == name for row, name in zip(rows, truth, strict=True)]
    assert right == run.read_evaluation(Target("digits", "base")).correct_images().tolist()
    assert [Path(row["path"]).name for row in rows] == sorted(file.name for file in photos.glob("0*.png"))


def test_shards_single_files_and_python_give_the_same_probabilities(run, photos, few_digits, capsys, tmp_path):
    files = sorted(photos.glob("0*.png"))[:3]
    classify = ImageClassifier.load(run.path)
    expected = classify([Image.open(files[0]), np.asarray(Image.open(files[1])), files[2]])
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(3))
    rows = predict(capsys, run.path, *files, "--top", 2)
    for row, probabilities in zip(rows, expected, strict=True):
        values, classes = probabilities.topk(2)
        assert [row["label"], row["label_2"]] == [classify.classnames[i] for i in classes]
        assert [float(row["probability"]), float(row["probability_2"])] == pytest.approx(values.tolist(), abs=2e-6)
    [packed] = (few_digits / "digits" / "test").glob("*.tar")
    shard = shutil.copy(packed, tmp_path / "0.TAR")
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(run.path), str(shard), "--out", str(out), "--workers", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = list(csv.DictReader(out.open()))
    images = len(image_selection.select_target_images(reader.open_dataset(few_digits, "digits")).images)
    assert summary["images"] == len(rows) == images and summary["classes"] == list(classify.classnames)


def test_a_run_is_selected_by_the_start_of_its_hash_or_by_flags(run, photos, few_digits, capsys):
    results = ("--results", run.path.parents[5])
    expected = predict(capsys, run.path, photos)
    names = reader.open_dataset(few_digits, "digits").manifest.classnames
    assert {row["class"] for row in expected} <= {*names} and all(
        row["class"].replace("_", " ") == row["label"] for row in expected
    )
    digits = run.path.name.rpartition("-")[2]
    assert predict(capsys, digits[:4], photos, *results) == expected
    assert predict(capsys, "--methods", "maple", "--datasets", "digits", photos, *results) == expected
    for words in (["fffffff0", photos], ["--methods", "coop", photos]):
        assert main(["predict", *map(str, (*words, *results))]) == 2
        assert "no run fits; see `procap ls runs" in capsys.readouterr().err


def test_an_image_of_python_that_cannot_be_read_is_named(run, photos, tmp_path):
    classify = ImageClassifier.load(run.path)
    readable = Image.open(sorted(photos.glob("0*.png"))[0])
    for picture, message in [
        (Image.new("F", (9, 9)), r"images\[1\] cannot be read: its pixels are 32-bit or floating-point numbers"),
        (np.zeros((9, 9, 7), np.uint8), r"images\[1\] cannot be read: an array of uint8 \[9, 9, 7\]"),
        (tmp_path / "missing.png", "missing.png cannot be read: No such file"),
    ]:
        with pytest.raises(UsageError, match=message):
            classify([readable, picture])


def test_rows_are_kept_on_a_stop_and_names_need_no_utf_8(run, photos, tmp_path, capsys, monkeypatch):
    folder, out = tmp_path / "mixed", tmp_path / "out.csv"
    shutil.copytree(photos, folder)
    out.write_text("old")
    first = sorted(folder.glob("0*.png"))[0]
    first.rename(os.fsdecode(os.fsencode(folder) + b"/0000caf\xe9.png"))
    predict_all = ImageClassifier.predict

    def interrupted(self, images, *more):
        for number, prediction in enumerate(predict_all(self, images, *more)):
            assert out.read_text().count("\n") == (number + 1 if number else 0)
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield prediction

    with monkeypatch.context() as patched:
        patched.setattr(ImageClassifier, "predict", interrupted)
        assert main(["predict", str(run.path), str(folder), "--out", str(out)]) == 130
    assert f"SIGINT: stopped after 4 images in {out}; repeated, it starts over" in capsys.readouterr().err
    rows = list(csv.DictReader(out.open(encoding="utf-8")))
    assert len(rows) == 4 and rows[0]["path"].endswith("0000caf\\udce9.png")
    assert main(["predict", str(run.path), str(folder)]) == 0
    assert "0000caf\\udce9.png" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_named_before_an_image_is_read(run, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("runner.session.Session.locate", None)
    assert main(["predict", str(run.path), str(photos), "--out", "/proc/p.csv"]) == 1
    assert "cannot write /proc/p.csv: No such file or directory; name another folder" in capsys.readouterr().err
    # A program that runs cannot be written, even by root.
    busy = shutil.copy(shutil.which("sleep"), tmp_path / "rows.csv")
    with subprocess.Popen([busy, "600"]) as process:
        assert main(["predict", str(run.path), str(photos), "--out", str(busy)]) == 1
        process.kill()
    assert f"cannot write {busy}: Text file busy" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    "predict RUN PHOTOS --html",
    "export RUN --out",
    "export RUN --format onnx --out",
    "export RUN --format ledger --out",
    "report --results RESULTS --out",
])  # fmt: skip
@pytest.mark.parametrize(("path", "why"), [
    ("/proc/p.html", "No such file or directory"), ("/dev/null", "Not a directory"),
])  # fmt: skip
def test_an_output_that_cannot_be_written_is_named_before_the_work(run, photos, capsys, monkeypatch, words, path, why):
    for begin in ("benchmarks.report.report.build_report", "runner.session.Session.locate"):
        monkeypatch.setattr(begin, None)
    names = {"RUN": run.path, "PHOTOS": photos, "RESULTS": run.path.parents[5]}
    if "--html" in words and path == "/dev/null":
        why = "it is no regular file"
    assert main([str(names.get(word, word)) for word in words.split()] + [path]) == 1
    assert capsys.readouterr().err == f"procap: error: cannot write {path}: {why}; name another folder\n"


def test_rows_for_devices_by_their_files_are_written(run, photos, capsys):
    """The file that a shell appends stdout to would be truncated, and a device cannot be."""
    assert main(["predict", str(run.path), str(photos), "--out", "/dev/stdout"]) == 0
    assert capsys.readouterr().out.startswith("path,class,label,probability\n")
    assert main(["predict", str(run.path), str(photos), "--out", "/dev/null"]) == 0
    assert main(["predict", str(run.path), str(photos), "--html", "/proc/self/fd/1"]) == 2
    assert "--html /proc/self/fd/1: name another file than that of the rows" in capsys.readouterr().err


def test_a_tilde_is_expanded_in_the_paths_of_images(run, photos, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(photos))
    name = sorted(photos.glob("0*.png"))[0].name
    [row] = predict(capsys, run.path, f"~/{name}")
    assert row["path"] == str(photos / name)


def test_the_best_of_several_runs_is_that_with_the_highest_validation_accuracy(few_digits, photos, capsys):
    flags = ["--methods", "probe,ncm", "--datasets", "digits", "--shots", "1", "--data", str(few_digits)]
    selected = ["predict", *flags[:4], str(photos), "--data", str(few_digits)]
    assert main(["train", *flags, "--tracking", "off"]) == 0
    assert main(selected) == 2
    assert "name one, or take the best on validation images with --best" in capsys.readouterr().err
    assert main(["predict", "--best", *selected[5:]]) == 0
    target, runs = Target("digits", "base", "val"), find_runs(Path("results"))
    accuracy = {run: run.read_evaluation(target).accuracy for run in runs}
    best = max(accuracy, key=lambda run: accuracy[run])
    expected = f"best of 2 runs on validation images, {accuracy[best]:.2f} %: {best.path.relative_to('results')}"
    assert expected in capsys.readouterr().err
    assert not list(Path("results").rglob("eval/*-test.json"))
    assert main(["train", *flags, "--classes", "all", "--tracking", "off"]) == 0
    assert main([*selected, "--best"]) == 2
    assert "not all classes of digits, base classes of digits: add --datasets or --classes" in capsys.readouterr().err


def test_other_class_names_can_be_chosen(run, photos, capsys):
    rows = predict(capsys, run.path, photos, "--names", "cat,dog")
    assert {row["label"] for row in rows} <= {"cat", "dog"}
    assert all(float(row["probability"]) >= 0.5 for row in rows)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("broken.jpg", b"\xff\xd8\xff and no more", "broken.jpg cannot be read: it is"),
    ("empty", None, "empty holds no images"),
    ("kinds", None, "kinds/one.heic is no image of a known format"),
    ("missing", b"", "missing does not exist"),
    ("shard.tar", b"no tar file", "shard.tar cannot be read as a tar without compression"),
    ("photos.zip", b"PK\3\4", "photos.zip cannot be read: it is no JPEG, PNG, GIF"),
])  # fmt: skip
def test_what_cannot_be_read_is_named_and_nothing_is_written(run, tmp_path, capsys, name, content, message):
    path, out = tmp_path / name, tmp_path / "out.csv"
    if content is None:
        path.mkdir()
        for file in ("one.heic", "notes.txt") if name == "kinds" else ():
            (path / file).write_text("")
    elif content:
        path.write_bytes(content)
    assert main(["predict", str(run.path), str(path), "--out", str(out)]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err and "notes" not in err and not out.exists()
    for other in (tmp_path, tmp_path / "photo.JPG"):
        assert main(["predict", str(run.path), str(path), "--out", str(other)]) == 2
        assert "name a CSV file in a folder that exists" in capsys.readouterr().err


def test_every_unreadable_image_is_named_and_the_others_are_classified(run, photos, tmp_path, capsys):
    folder, out = tmp_path / "mixed", tmp_path / "out.csv"
    shutil.copytree(photos, folder)
    readable = sorted(file.name for file in folder.glob("0*.png"))
    for name in ("0000a.png", "zz.jpg"):
        (folder / name).write_bytes(b"no image")
    Image.new("RGB", (300_000, 1)).save(folder / "zz-thin.png")
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"no tar file")
    words = ["predict", str(run.path), str(folder), str(broken), "--out", str(out), "--json"]
    assert main([*words, "--workers", "2"]) == 1
    printed = capsys.readouterr()
    failed = json.loads(printed.out.splitlines()[-1])["failed"]
    assert {Path(name).name for name in failed} == {"0000a.png", "zz.jpg", "zz-thin.png", "broken.tar"}
    assert all(f"{name} {reason}" in printed.err for name, reason in failed.items())
    assert [Path(row["path"]).name for row in csv.DictReader(out.open())] == readable
    assert "1 file skipped, no images" in printed.err


def test_a_page_shows_each_image_with_its_likeliest_classes(run, photos, tmp_path, capsys):
    (broken := tmp_path / "broken.png").write_bytes(b"no image")
    page, out = tmp_path / "photos.html", tmp_path / "photos.csv"
    words = ["predict", str(run.path), str(photos), str(broken), "--out", str(out), "--html", str(page), "--top", "2"]
    assert main(words) == 1
    rows, text = list(csv.DictReader(out.open())), page.read_text()
    assert text.count("<img src=") == text.count("data:image/jpeg;base64,") == len(rows) and "broken.png" not in text
    for row in rows:
        shown = text.partition(f"<small>{row['path']}")[0].rpartition("<figure>")[2]
        percent = f"{100 * float(row['probability']):.1f}&nbsp;%"
        assert f"<b>{row['label']}</b> {percent}" in shown and row["label_2"] in shown
