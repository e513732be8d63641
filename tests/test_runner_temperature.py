"""The temperature of an evaluation: fitted on few-shot images that were held out, never on what weights have seen."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from sessions import evaluate, load_trained, train
from small_runs import make_runtime

from benchmarks.cli import main
from benchmarks.results import load
from procap.errors import UsageError
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.planning import plan_run
from runner.run_folders import RunFolder
from runner.temperature import minimize_nll
from shards import image_selection, reader, transforms

FITTED = EvalSettings(temperature="shots")
TARGETS = [Target("digits", "base"), Target("digits", "novel")]


def test_three_of_four_right_by_a_margin_of_two_have_a_temperature_of_two_over_log_three():
    """At T the true class has the probability 1 / (1 + exp(-2 / T)), best 3/4: exp(2 / T) = 3."""
    logits = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    assert minimize_nll(logits, np.array([0, 0, 1, 1])) == round(2 / math.log(3), 4) == 1.8205
    assert minimize_nll(10 * logits, np.array([0, 0, 1, 1])) == round(20 / math.log(3), 4)


def test_a_temperature_stays_in_its_bounds_where_all_are_right():
    assert minimize_nll(np.eye(3), np.arange(3)) == 0.05
    assert minimize_nll(-np.eye(3), np.arange(3)) == 20.0


def plan(checkpoint: str, method: str = "coop", **fields: object) -> RunConfig:
    """Three shots of five base classes, in batches that two and four processes can share."""
    overrides = {"epochs": 1, "batch_size": 4, "drop_last": True, "lr": 0.1, "test_batch_size": 8}
    fields = {"shots": 3, "overrides": overrides, **fields}
    return plan_run(method=method, dataset="digits", backbone=checkpoint, **fields)


@pytest.fixture(scope="module")
def runtime(few_digits, short_checkpoint, tmp_path_factory) -> RuntimeConfig:
    """Where a run is evaluated on both halves, as it is and with its temperature."""
    default = make_runtime(few_digits, tmp_path_factory.mktemp("results"))
    train(plan(str(short_checkpoint)), default)
    for target in TARGETS:
        evaluate(plan(str(short_checkpoint)), target, default)
        evaluate(plan(str(short_checkpoint)), target, replace(default, evaluation=FITTED))
    return default


def fold_runs(folder: RunFolder) -> list[RunFolder]:
    return sorted((RunFolder(file.parent) for file in folder.path.glob(".folds/**/config.json")), key=str)


def test_each_image_is_held_out_of_one_training_which_the_temperature_is_fitted_on(runtime, short_checkpoint):
    config = plan(str(short_checkpoint))
    folder = RunFolder(runtime.results / config.path)
    samples, logits, labels, held_out = folder.read_training().fewshot.samples, [], [], []
    dataset = reader.open_dataset(runtime.data, "digits")
    images = image_selection.select_training_images(dataset, config.shots, config.seed, config.classes).train
    for fold in fold_runs(folder):
        seen = fold.read_training().fewshot.samples
        held_out += (absent := [path for path in samples if path not in seen])
        assert len(absent) == 5 and len({images.labels[samples.index(path)] for path in absent}) == 5
        trained = load_trained(fold.read_config(), replace(runtime, results=folder.path / ".folds"))
        transform = transforms.EvalTransform(32, trained.clip.preparation.mean, trained.clip.preparation.std)
        pixels = torch.stack([transform(images.image(samples.index(path))) for path in absent])
        logits.append(trained.method.classifier()(pixels).double())
        labels += [images.labels[samples.index(path)] for path in absent]
    assert sorted(held_out) == sorted(samples)
    # Of a fine grid, the best temperature.
    grid = torch.arange(0.05, 20, 0.005, dtype=torch.float64)
    nll = [torch.nn.functional.cross_entropy(torch.cat(logits) / t, torch.tensor(labels)).item() for t in grid]
    fitted = folder.read_evaluation(TARGETS[0], FITTED).temperature
    assert fitted == pytest.approx(grid[np.argmin(nll)].item(), abs=0.005)


def test_results_have_the_predictions_of_the_run_and_divided_logits(runtime, short_checkpoint):
    config = plan(str(short_checkpoint))
    folder = RunFolder(runtime.results / config.path)
    plain, fitted = ([folder.read_evaluation(target, s) for target in TARGETS] for s in (EvalSettings(), FITTED))
    assert [result.predicted for result in plain] == [result.predicted for result in fitted]
    assert fitted[0].temperature == fitted[1].temperature and plain[0].temperature is None
    trained = load_trained(config, runtime)
    selection = image_selection.select_target_images(reader.open_dataset(runtime.data, "digits"), "novel")
    transform = transforms.EvalTransform(32, trained.clip.preparation.mean, trained.clip.preparation.std)
    pixels = torch.stack([transform(selection.images.image(i)) for i in range(len(selection.images))])
    logits = trained.method.classifier(replace(trained.method.space, classnames=selection.classnames))(pixels)
    probabilities = (logits / fitted[1].temperature).softmax(dim=1)
    assert fitted[1].confidence == pytest.approx(probabilities.amax(dim=1).tolist(), abs=1e-5)
    nll = torch.nn.functional.cross_entropy(logits / fitted[1].temperature, torch.from_numpy(selection.images.labels))
    assert fitted[1].calibration.nll == pytest.approx(nll.item(), rel=1e-5)


def test_the_calibration_table_has_both_settings_and_the_temperature(runtime, capsys):
    assert main(["table", "calibration", "--results", str(runtime.results), "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]
    titles = [row["labels"][1] for row in table["rows"]]
    assert titles == ["CoOp, evaluation default", "CoOp, evaluation temperature shots"] * 2
    assert [column["title"] for column in table["columns"]][2:] == ["NLL", "ECE", "Brier", "T"]
    assert main(["ls", "runs", "--results", str(runtime.results), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])) == 1, "folds are no runs of their own"


def test_without_training_it_depends_on_the_shots_and_the_seed(few_digits, short_checkpoint, tmp_path, capsys):
    default, temperatures = make_runtime(few_digits, tmp_path / "a"), {}
    for shots, seed in ((2, 1), (3, 1), (3, 2)):
        config = plan(str(short_checkpoint), "zeroshot", shots=shots, seed=seed, overrides={})
        train(config, default)
        assert evaluate(config, TARGETS[0], default).temperature is None
        temperatures[shots, seed] = evaluate(config, TARGETS[0], replace(default, evaluation=FITTED)).temperature
    assert len({*temperatures.values()}) == 3
    frame = load(default.results, evaluation=None)
    fitted = frame[frame.evaluation != ""]
    assert dict(zip(zip(fitted.shots, fitted.seed, strict=True), fitted.temperature, strict=True)) == temperatures
    assert len(frame) == 4, "without a temperature they are one result"
    assert fitted.groupby("variant").seed.unique().map(list).to_list() == [[1], [1, 2]]
    name, printed = (
        "CLIP (zero-shot), {}evaluation temperature shots",
        {"1": temperatures[3, 1], "2": temperatures[3, 2]},
    )
    for flags, title, by_seed in (
        ([], "shots 3, ", printed),
        (["--shots", "3", "--seeds", "2"], "", {"2": printed["2"]}),
    ):
        assert main(["table", "calibration", "--results", str(default.results), *flags, "--json"]) == 0
        [table] = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]
        cells = {row["labels"][1]: row["cells"][-1] for row in table["rows"]}
        assert cells[name.format(title)]["seeds"] == by_seed and (len(cells) == 2) == bool(flags)
    uneven = plan(str(short_checkpoint), "zeroshot", shots=3, overrides={}, sampling="decay:0.25")
    assert uneven.hash == plan(str(short_checkpoint), "zeroshot", shots=3, overrides={}).hash
    other = make_runtime(few_digits, tmp_path / "b", evaluation=FITTED)
    train(uneven, other)
    assert evaluate(uneven, TARGETS[0], other).temperature == temperatures[3, 1], "it is one run for all samplings"


def fit_again(data: str, results: str, checkpoint: str) -> None:
    ranks = ranks_from_environment()
    folder = results if ranks.is_first else f"{results}-of-{ranks.rank}"
    with init_process_group(ranks, torch.device("cpu")) as group:
        evaluate(plan(checkpoint), TARGETS[0], make_runtime(data, folder, evaluation=FITTED), force=True, group=group)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_write_the_result_of_one(runtime, few_digits, short_checkpoint, tmp_path, size):
    shutil.copytree(runtime.results, tmp_path, dirs_exist_ok=True)
    config = plan(str(short_checkpoint))
    shutil.rmtree(tmp_path / config.path / ".folds")
    ends = run_ranks(size, fit_again, str(few_digits), str(tmp_path), str(short_checkpoint))
    assert [end.code for end in ends] == [0] * size, "".join(end.err for end in ends)
    one, two = (RunFolder(at / config.path).read_evaluation(TARGETS[0], FITTED) for at in (runtime.results, tmp_path))
    assert one.seconds != two.seconds and len(fold_runs(RunFolder(tmp_path / config.path))) == 3
    assert (one.temperature, one.confidence, one.calibration) == (two.temperature, two.confidence, two.calibration)


@pytest.mark.parametrize(("method", "fields", "words"), [
    ("coop", {"shots": 1}, "train with --shots 2 or more"),
    ("coop", {"shots": 0}, "train with --shots 2 or more"),
    ("tipadapterf", {"options": {"selection": "test"}, "overrides": {}}, "chosen by test images"),
])  # fmt: skip
def test_a_run_whose_images_cannot_be_held_out_is_refused(short_checkpoint, method, fields, words):
    with pytest.raises(UsageError, match=f"^--temperature shots: .*{words}"):
        FITTED.for_run(plan(str(short_checkpoint), method, **fields))
    assert FITTED.for_run(plan(str(short_checkpoint), "zeroshot", overrides={})) == FITTED


def test_a_run_that_learns_from_a_finished_run_is_refused(short_checkpoint, tmp_path):
    (tmp_path / "config.json").touch()
    taught = plan(str(short_checkpoint), "kdpl", options={"teacher": str(tmp_path)})
    started = plan(str(short_checkpoint)).model_copy(update={"init": "base/digits/coop", "init_digest": "0" * 64})
    for config in (taught, started):
        with pytest.raises(UsageError, match=r"^--temperature shots: .*learns from a finished run"):
            FITTED.for_run(config)
