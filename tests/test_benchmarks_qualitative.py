"""The qualitative pictures show what their rule says, and their record holds what the runs really answer."""

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import pytest
import sessions
import torch
from made_results import made, table_of
from PIL import Image
from small_runs import make_runtime

from benchmarks.experiment.profiles import PAPER, find_profile
from benchmarks.qualitative.eigencam import image_maps
from benchmarks.qualitative.learned_prompts import read_prompts, record_prompts
from benchmarks.qualitative.pictures import make_pictures, select_images
from benchmarks.qualitative.plots import draw_predictions
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from benchmarks.suites.outputs import remove_outdated
from benchmarks.tables.agreement import check_table
from benchmarks.tables.qualitative import qualitative_tables
from runner import run_folders
from runner.config import RunConfig, RuntimeConfig, Target
from runner.session import Session
from shards import image_selection, reader, transforms

TITLES = {"zeroshot": "CLIP", "coop": "CoOp", "cocoop": "CoCoOp", "maple": "MaPLe-style", "procap": "ProCAP"}
PAIR = ("maple", "procap")


@pytest.fixture(scope="module")
def place(few_digits, tmp_path_factory) -> RuntimeConfig:
    return make_runtime(few_digits, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def done(tiny_checkpoint, place) -> SuiteResults:
    """The suite on digits with a tiny CLIP, before anything was run."""
    quick = {"epochs": 1, "batch_size": 20, "lr": 0.02, "warmup": "none", "test_batch_size": 16}
    suite = load_suite("qualitative")
    more: dict[str, Any] = {
        "datasets": ("digits",), "methods": tuple(TITLES), "backbone": str(tiny_checkpoint), "overrides": quick,
    }  # fmt: skip
    return SuiteResults.read(suite, suite.options(find_profile("mini"), **more), place.results)


def test_pictured_runs_are_of_base_classes_and_maple_has_the_tokens_and_recipe_of_procap(tmp_path):
    done = made(tmp_path, "qualitative", PAPER)
    runs = {(run.dataset, run.spec.config.method): run.spec for run in done.runs}
    assert {spec.config.classes for spec in runs.values()} == {"base"}
    targets = {target for spec in runs.values() for target in spec.targets}
    assert targets == {"oxford-flowers:base:test", "eurosat:base:test"}
    maple, procap = (runs["eurosat", method].config for method in PAIR)
    assert maple.options["n_ctx"] == procap.options["n_ctx"] == 4 and maple.recipe == procap.recipe


def test_the_accuracies_of_pictured_runs_stand_beside_those_of_the_paper(tmp_path):
    done = made(tmp_path, "qualitative", PAPER)
    ours = {variant.name: done.metric(variant, "eurosat", Target("eurosat", "base")) for variant in done.variants}
    rows = table_of(done, "qualitative-accuracy").rows
    assert [row.cells[0].mean for row in rows if row.source == "published"] == [96.86, 98.43]
    beside = {row.labels[0]: (row.cells[0].mean, row.cells[1]) for row in check_table(done, 1.0)[0].rows}
    assert beside == {f"EuroSAT, {title}": (ours[title].mean, paper) for title, paper in
                      (("MaPLe-style", "96.86"), ("ProCAP", "98.43"))}  # fmt: skip


@pytest.fixture(scope="module")
def run(done, place):
    """A finished run of a method, trained when it is first asked for."""

    def finished(method: str) -> RunConfig:
        [config] = [entry.spec.config for entry in done.runs if entry.variant.method == method]
        if not run_folders.RunFolder(place.results / config.path).read_training():
            sessions.train(config, place)
        return config

    return finished


@pytest.fixture(scope="module")
def pair(done, run, place) -> dict[str, Any]:
    """The record of MaPLe beside ProCAP, as the suite makes the pictures."""
    for method in PAIR:
        run(method)
    entries = tuple(entry for entry in done.runs if entry.variant.method in PAIR)
    return make_pictures(dataclasses.replace(done, runs=entries), Session(place))


def matrices() -> list[np.ndarray]:
    """Who of two or three methods is right about which image, from never to always, and without a difference."""
    sizes = [(methods, images) for methods in (2, 3) for images in (1, 5, 40)]
    drawn = [np.random.default_rng(seed).random(size) < seed / 4 for seed in range(5) for size in sizes]
    return [*drawn, np.array([[True, False, True]] * 2)]


@pytest.mark.parametrize("count", [1, 7])
def test_picked_are_the_first_images_on_which_the_methods_differ(count):
    for right in matrices():
        mixed = [number for number, column in enumerate(right.T.tolist()) if len(set(column)) > 1]
        assert select_images(right, count) == (mixed or [*range(right.shape[1])])[:count]


def test_every_picked_image_is_answered_as_recorded(pair, run, place):
    """One image after the other, from the shards to the class and to the map."""
    selection = image_selection.select_target_images(reader.open_dataset(place.data, "digits"), "base")
    for method in PAIR:
        loaded = sessions.load_trained(run(method), place)
        transform = transforms.EvalTransform(32, loaded.clip.preparation.mean, loaded.clip.preparation.std)
        classifier = loaded.method.classifier(dataclasses.replace(loaded.method.space, classnames=selection.classnames))
        for pick in pair["picks"]:
            assert selection.images.paths[pick["index"]] == pick["path"]
            assert selection.classnames[selection.images.labels[pick["index"]]] == pick["class"]
            pixels = transform(selection.images.image(pick["index"]))[None]
            answer = selection.classnames[int(classifier(pixels).argmax())]
            assert pick["answers"][TITLES[method]] == answer
            assert pick["right"][TITLES[method]] == (answer == pick["class"])
            cam = image_maps(loaded.clip, pixels, classifier.image_plan)
            np.testing.assert_allclose(pick["eigencam"][TITLES[method]], cam[0])


def test_the_pictures_and_the_record_are_there(pair, place):
    assert list(pair["pictures"]) == ["predictions", "eigencam", "prompts"]
    folder = place.results / "collections" / "suite" / "qualitative"
    assert json.loads((folder / "pictures.json").read_text()) == pair
    for name in pair["pictures"]:
        picture = folder / f"{name}.png"
        assert min(Image.open(picture).size) > 300
        assert picture.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert "MaPLe-style, ProCAP" in pair["pictures"]["predictions"]["alt"]
    assert "digits" in pair["pictures"]["predictions"]["caption"]


def test_pictures_of_another_choice_are_shown_nowhere_and_one_method_has_its_prompts_alone(done, pair, place, tmp_path):
    """Tables are read from the record of the pictures; what is recorded of other runs says nothing of these."""
    entries = (tuple(run for run in done.runs if run.variant.method in methods) for methods in (PAIR, ("procap",)))
    both, one = (dataclasses.replace(done, runs=chosen) for chosen in entries)
    assert [table.name for table in qualitative_tables(both)] == ["qualitative"]
    assert qualitative_tables(one) == [] and one.pictures == {}
    elsewhere = dataclasses.replace(one, results=tmp_path)
    shutil.copytree(place.results, tmp_path, dirs_exist_ok=True)
    made = make_pictures(elsewhere, Session(dataclasses.replace(place, results=tmp_path)))
    assert list(made["pictures"]) == ["prompts"]
    (words,) = qualitative_tables(elsewhere)
    assert {row.labels[0] for row in words.rows} == {"ProCAP"}
    assert qualitative_tables(dataclasses.replace(both, results=tmp_path)) == []
    folder = tmp_path / "collections/suite/qualitative"
    remove_outdated(folder, ["predictions", "eigencam", "prompts"])
    remove_outdated(folder, made["pictures"])
    assert not (folder / "predictions.png").exists() and not (folder / "eigencam.pdf").exists()
    assert {file.name for file in folder.iterdir()} >= {"prompts.png", "prompts.pdf", "pictures.json"}


def test_learned_tokens_are_recorded_with_their_words(pair, run, place):
    method = sessions.load_trained(run("procap"), place).method
    [entry] = [entry for entry in pair["prompts"]["methods"] if entry["title"] == "ProCAP"]
    assert [stage["name"] for stage in entry["stages"]] == ["learned means", "after cross-attention"]
    tokens = method.text_mu[0], method.refine(*method.tokens(None))[1][0]
    for stage, learned in zip(entry["stages"], tokens, strict=True):
        values = torch.tensor([token["values"] for token in stage["tokens"]], dtype=torch.float64)
        torch.testing.assert_close(values, learned.detach().double())
        # ProCAP starts at the words of the data set's template.
        assert [token["started"]["word"] for token in stage["tokens"]] == ["a", "photo", "of", "the"]
        for token in stage["tokens"]:
            assert token["moved"] > 0
            cosines = [word["value"] for word in token["cosine"]]
            assert cosines == sorted(cosines)[::-1]


def test_without_learned_prompts_there_are_no_random_ones(run, place):
    prompts = record_prompts([read_prompts("A", sessions.load_trained(run("zeroshot"), place))])
    [recorded] = prompts["methods"]
    assert (prompts["random"], recorded["title"], recorded["stages"]) == (None, "A", [])


def test_class_names_and_answers_of_any_length_are_whole_and_cover_nothing():
    name = "white flower with many thin petals around a large yellow middle on a long stem by the sea"
    answers = {"CLIP (zero-shot)": "an answer that takes as many as three lines", "ProCAP": name}
    pick = {"class": name, "answers": answers, "right": {"CLIP (zero-shot)": False, "ProCAP": True}}
    record = {"picks": [pick] * 8, "target": "digits:base:test", "images": {"seen": 8, "of": 10}}
    figure = draw_predictions(record, [np.zeros((32, 32, 3), np.uint8)] * 8)
    figure.draw_without_rendering()
    assert {" ".join(panel.get_title().split()) for panel in figure.axes} == {name}
    for above, below in zip(figure.axes[:4], figure.axes[4:], strict=True):
        lowest = min(text.get_window_extent().y0 for text in above.texts)
        assert lowest > below.title.get_window_extent().y1
        assert min(text.get_window_extent().y0 for text in below.texts) > 0
