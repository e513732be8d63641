"""`procap report` of runs without a suite and of sweeps."""

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_results import put_run, put_score
from report_pages import Node, Page, every, tables, words_of
from small_runs import make_runtime

from benchmarks.cli import main
from benchmarks.report.mistakes import IMAGES_OF_CLASS, MAX_IMAGES, MAX_PAIRS
from benchmarks.report.page import PageFiles
from benchmarks.results import load
from cluster.sweep import Sweep
from cluster.sweep_record import Configuration, SweepFolder, SweepSettings
from runner.inference import count_by_class
from runner.results import Progress, write_json
from runner.run_collection import Collection, write_collection
from runner.run_folders import RunFolder
from runner.session import Session
from shards.image_selection import select_target_images
from shards.reader import open_dataset

SHARES = {"coop": 0.9, "maple": 0.6, "zeroshot": 0.3}


def put_predictions(results, config, labels, predicted, names, digest):
    right = predicted == labels
    file = put_score(results, config, f"{config.dataset}:all", int(right.sum()), len(labels))
    document = json.loads(file.read_text()) | {
        "per_class": count_by_class(labels, right, names).model_dump(),
        "num_classes": len(names),
        "manifest_digest": digest,
        "labels": labels.tolist(),
        "predicted": predicted.tolist(),
    }
    file.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def digits(few_digits):
    return select_target_images(open_dataset(few_digits, "digits"))


@pytest.fixture(scope="module")
def made(few_digits, digits, tmp_path_factory):
    """Zero-shot CLIP, two methods with two seeds, one only trained, one unfinished, and a sweep with zero-shot CLIP."""
    root = tmp_path_factory.mktemp("runs") / "results"
    labels, names = digits.images.labels, list(digits.classnames)
    manifest, predictions = open_dataset(few_digits, "digits").manifest.digest, {}
    for number, (method, seed) in enumerate([("zeroshot", 1), ("coop", 1), ("coop", 2), ("maple", 1), ("maple", 2)]):
        draws = np.random.default_rng(number)
        guessed = np.where(draws.random(len(labels)) < SHARES[method], labels, draws.integers(0, 10, len(labels)))
        config = put_run(root, method, "digits", seed=seed, classes="all")
        put_predictions(root, config, labels, guessed, names, manifest)
        predictions[method, seed] = guessed
    put_run(root, "vpt", "digits")
    unfinished = put_run(root, "kgcoop", "digits")
    RunFolder(root / unfinished.path).train_file.unlink()
    failed = {"config_hash": unfinished.hash, "status": "failed", "reason": "no loss", "step": 0, "steps": 9}
    fields = {**failed, "epochs": [], "seconds": 1, "environment": {}}
    write_json(RunFolder(root / unfinished.path).progress_file, Progress(**fields))
    swept = {"space": {"lr": [0.01, 0.1]}, "methods": ("coop",), "datasets": ("digits",), "seeds": (3,)}
    runs = [put_run(root, "coop", "digits", seed=3, overrides={"lr": rate}).path for rate in (0.01, 0.1)]
    configurations = [
        Configuration(values={"lr": rate}, runs=(run,), state="finished", scores={run: score}, epochs=1)
        for rate, run, score in zip((0.01, 0.1), runs, (50.0, 51.0), strict=True)
    ]
    SweepFolder(root / "sweeps/rates").save(SweepSettings(name="rates", **swept), configurations)
    runs += [folder.relative_to(root).as_posix() for folder in root.glob("all/digits/zeroshot/*/*/*")]
    write_collection(root, Collection(kind="sweep", name="rates", runs=tuple(runs), status="finished"))
    return root, predictions


def write(root, data, out, *flags):
    assert main(["report", "--results", str(root), "--data", str(data), "--out", str(out), *flags]) == 0
    return Page((out / "index.html").read_text()).root


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return tmp_path_factory.mktemp("page") / "page"


@pytest.fixture(scope="module")
def tree(made, few_digits, page):
    return write(made[0], few_digits, page)


def images_of(tree: Node) -> list[Node]:
    return [item for part in every(tree) if part.attributes.get("class") == "images" for item in part.all("li")]


def test_single_runs_and_sweeps_have_sections_and_unfinished_runs_are_named(tree):
    assert [node.text() for node in tree.all("h2")][:3] == ["Sweep rates", "Other runs", "What failed or is missing"]
    shown = tables(tree)
    best = [words_of(cell) for cell in shown["Sweep rates"].all("tr")[1].all("td")]
    assert best[1:3] == ["0.1", "51.00"]
    missing = words_of(next(node for node in tree.all("section") if node.attributes["id"] == "missing"))
    assert "kgcoop" in missing and "failed: no loss" in missing and "not evaluated" in missing


def test_a_sweep_has_a_table_by_its_name(made, capsys):
    assert main(["table", "rates", "--results", str(made[0]), "--format", "csv"]) == 0
    assert ",0.1,51.0," in capsys.readouterr().out.splitlines()[1]
    assert main(["table", "rates", "--results", str(made[0]), "--check"]) == 2
    assert "no --check" in capsys.readouterr().err


def test_the_score_of_a_sweep_is_that_of_its_results(made, tmp_path, capsys):
    root = tmp_path / "results"
    shutil.copytree(made[0], root)
    record = SweepFolder(root / "sweeps/rates").load()
    [run] = record.configurations[0].runs
    config = RunFolder(root / run).read_config()
    put_score(root, config, "digits:base:val", 45, 45)
    assert main(["table", "rates", "--results", str(root), "--format", "csv"]) == 0
    assert ",0.01,100.0," in capsys.readouterr().out.splitlines()[1]
    # A repeated sweep reads it as well, by the fields as it writes them.
    settings = record.settings.model_copy(update={"space": {"recipe.lr": [0.01, 0.1]}})
    folder, stored = SweepFolder(root / "sweeps/again"), record.configurations[0]
    folder.save(settings, [stored.model_copy(update={"values": {"recipe.lr": 0.01}})])
    [again] = Sweep(settings, Session(make_runtime(tmp_path, root)), folder).configurations.values()
    assert (stored.score, again.score) == (50.0, 100.0)


@pytest.mark.parametrize("damage", [
    lambda file: file.write_text(file.read_text()[:99]), lambda file: file.write_bytes(b"\xff\0"),
    lambda file: file.write_text("[]"), lambda file: file.unlink() or file.mkdir(),
])  # fmt: skip
def test_a_broken_configuration_leaves_out_its_run_alone(made, few_digits, tmp_path, capsys, damage):
    root = tmp_path / "results"
    shutil.copytree(made[0], root)
    [swept] = SweepFolder(root / "sweeps/rates").load().configurations[1].runs
    alone = put_run(root, "clipadapter", "digits").path
    for path in (swept, alone):
        damage(root / path / "config.json")
    for command in ("table", "ls runs"):
        assert main([*command.split(), "--results", str(root)]) == 1
        out, err = capsys.readouterr()
        left_out = [line for line in err.splitlines() if "is left out: " in line and "config.json" in line]
        assert len(left_out) == 2 and "maple" in out.lower() and "clipadapter" not in out
        # Of another method, by their paths.
        assert main([*command.split(), "--methods", "maple", "--results", str(root)]) == 0
        assert "left out" not in capsys.readouterr().err
    # It may be the run that is meant.
    assert main(["predict", "--methods", "clipadapter", str(tmp_path), "--results", str(root)]) == 1
    assert f"{alone}/config.json" in capsys.readouterr().err
    assert main(["predict", "--methods", "tpt", str(tmp_path), "--results", str(root)]) == 2
    with pytest.warns(UserWarning, match="is left out: .*config.json") as caught:
        assert {*load(root).method} == {"zeroshot", "coop", "maple"}
    assert {warning.filename for warning in caught} == {__file__}
    assert "missing" not in [
        node.attributes.get("id")
        for node in write(root, few_digits, tmp_path / "selected", "--methods", "maple").all("section")
    ]
    tree = write(root, few_digits, tmp_path / "page")
    assert [node.text() for node in tree.all("h2")][:3] == ["Sweep rates", "Other runs", "What failed or is missing"]
    missing = words_of(next(node for node in tree.all("section") if node.attributes["id"] == "missing"))
    assert f"{alone}:" in missing and swept in missing and "broken" in missing and missing.count(alone) == 2


def test_confusions_are_those_of_scikit_learn_and_classes_have_their_accuracy(tree, made, digits):
    from sklearn.metrics import confusion_matrix

    shown, labels = tables(tree), digits.images.labels
    for method, title in (("coop", "CoOp"), ("maple", "MaPLe")):
        expected = sum(confusion_matrix(labels, made[1][method, seed], labels=range(10)) for seed in (1, 2))
        rows = shown[f"Confusion matrix of {title}: digits, all classes"].all("tr")[1:]
        found = [[int(cell.text()) for cell in row.all("td")[1:]] for row in rows]
        assert found == expected.tolist()
        marked = [["right" in cell.attributes["class"].split() for cell in row.all("td")[1:]] for row in rows]
        assert [row.index(True) for row in marked] == list(range(10))
    table = shown["Accuracy by class: digits, all classes"]
    heads = [words_of(head) for head in table.all("tr")[0].all("th")]
    place = heads.index("CoOp")
    for row in table.all("tr")[1:]:
        own = labels == digits.classnames.index(words_of(row.all("td")[0]))
        shares = [100 * (made[1]["coop", seed] == labels)[own].mean() for seed in (1, 2)]
        assert words_of(row.all("td")[place]) == f"{np.mean(shares):.2f}"
        untrained = words_of(row.all("td")[heads.index("CLIP (zero-shot)")])
        assert untrained == f"{100 * (made[1]['zeroshot', 1] == labels)[own].mean():.2f}"


def test_misclassified_images_are_the_wrong_ones_of_the_test_set(tree, made, digits, page):
    from PIL import Image

    labels, predictions = digits.images.labels, made[1].values()
    times = sum((guessed != labels).astype(int) for guessed in predictions)
    items, order = images_of(tree), ["zeroshot", "coop", "maple"].index
    places = [digits.images.paths.index(item.all("img")[0].attributes["alt"]) for item in items]
    assert 0 < len(places) == len(set(places)) <= MAX_IMAGES
    assert max(np.bincount(labels[places])) <= IMAGES_OF_CLASS
    for item, place in zip(items, places, strict=True):
        better = times[labels == labels[place]]
        assert times[place] >= sorted(better)[-IMAGES_OF_CLASS], "those most often wrong"
        label = item.all("strong")[0].text()
        assert label == digits.classnames[labels[place]]
        wrong = {digits.classnames[guessed[place]] for guessed in predictions} - {digits.classnames[labels[place]]}
        titles = {"zeroshot": "CLIP (zero-shot)", "coop": "CoOp", "maple": "MaPLe"}
        [link] = item.all("a")
        assert words_of(link) == digits.images.paths[place]
        for part in words_of(item).removeprefix(label).removesuffix(words_of(link)).strip().split("; "):
            named, _, answer = part.partition(": ")
            gave = {key[0] for key, own in made[1].items() if digits.classnames[own[place]] == answer}
            assert answer in wrong and named.split(", ") == [titles[method] for method in sorted(gave, key=order)]
        jpeg = base64.b64decode(item.all("img")[0].attributes["src"].partition("base64,")[2])
        shown, whole = Image.open(io.BytesIO(jpeg)), digits.images.image(place)
        assert np.abs(np.asarray(shown, float) - np.asarray(whole.resize(shown.size), float)).mean() < 12
        assert Image.open(page / link.attributes["href"]).size == whole.size


def test_the_file_of_a_photograph_has_a_name_that_file_systems_take():
    assert len(Path(PageFiles().photo(f"{'a' * 200}/{'b' * 200}.jpg", b"")).name) < 255


def test_mistakes_are_of_the_variant_of_each_method_with_the_most_shots(tmp_path):
    labels = np.repeat(np.arange(3), 4)
    for method, shots in [("coop", 16), ("coop", 2), ("probe", 0), ("probe", 4), ("ncm", 4)]:
        config = put_run(tmp_path, method, "digits", classes="all", shots=shots)
        put_predictions(tmp_path, config, labels, np.roll(labels, shots), ["a", "b", "c"], "d" * 16)
    shown = tables(write(tmp_path, tmp_path / "none", tmp_path / "page"))
    heads = [words_of(head) for head in shown["Accuracy by class: digits, all classes"].all("tr")[0].all("th")]
    assert len(heads) == 5 and {*heads[2:]} == {"CoOp, shots 16", "Linear probe, shots full", "Nearest mean, shots 4"}


def test_flags_select_runs_and_what_does_not_exist_is_refused(made, few_digits, tmp_path, capsys):
    tree = write(made[0], few_digits, tmp_path / "page", "--methods", "maple", "--seeds", "2")
    assert next(node.text() for node in tree.all("h2")) == "Selected runs"
    assert all("of 1" not in item.text() and "(" not in item.text() for item in images_of(tree)), "one evaluation"
    tree = write(made[0], few_digits, tmp_path / "page", "rates")
    assert next(node.text() for node in tree.all("h2")) == "Sweep rates"
    root = tmp_path / "results"
    shutil.copytree(made[0], root)
    capsys.readouterr()
    for place, name in (("report", ""), ("report-rates", "rates")):
        assert main(["report", "--results", str(root), *filter(None, [name])]) == 0
        assert capsys.readouterr().out.strip() == str(root / place / "index.html")
    headings = {path.parent.name: Page(path.read_text()).root.all("h2")[0].text() for path in root.glob("*/index.html")}
    assert headings == {"report": "Sweep rates", "report-rates": "Sweep rates"}
    for flags, why in (
        (["--methods", "tcp"], "no run below"),
        (["rates", "--seeds", "1"], "name suites or select"),
        (["none"], "unknown suite 'none'"),
    ):
        assert main(["report", "--results", str(root), *flags]) in (1, 2)
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(("classes", "share"), [(2, 0.7), (30, 1.0), (1000, 0.7)])
def test_the_page_stays_small_for_any_number_of_classes(tmp_path, classes, share):
    draws = np.random.default_rng(classes)
    labels = np.repeat(np.arange(classes), 3)
    predicted = np.where(draws.random(len(labels)) < share, labels, draws.integers(0, classes, len(labels)))
    config = put_run(tmp_path, "coop", "digits", classes="all")
    put_predictions(tmp_path, config, labels, predicted, [f"class {i}" for i in range(classes)], "d" * 16)
    tree = write(tmp_path, tmp_path / "none", tmp_path / "page")
    shown = tables(tree)
    matrix, pairs = "Confusion matrix of CoOp: digits, all classes", "Most confused classes: digits, all classes"
    assert (matrix in shown, pairs in shown) == (classes <= 20, classes > 20 and share < 1)
    assert pairs not in shown or 0 < len(shown[pairs].all("tr")) - 1 <= MAX_PAIRS
    page = tmp_path / "page"
    # A long table scrolls below its heads.
    sheet = next(node for node in every(tree) if node.attributes.get("id") == "table-classes-digits-all")
    assert ("long" in sheet.attributes["class"].split()) == (classes == 1000) and not sheet.all("details")
    assert (page / "index.html").stat().st_size < 200_000
    written = json.loads((page / "tables/classes-digits-all.json").read_text())
    assert len(written["rows"]) == classes, "the files have all rows"
