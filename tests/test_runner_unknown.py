"""Unknown images: scores by maximum concept matching, their files, and what tables, pages and frames say of them."""

import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from command_line import run
from made_results import put_run, put_score
from matplotlib.text import Text
from PIL import Image
from rank_processes import run_ranks
from sessions import evaluate, load_trained, make_run, train
from small_runs import make_runtime, only_run

from benchmarks.plots.runs import score_histograms
from benchmarks.plots.style import draw_styled
from benchmarks.results import load
from benchmarks.results.detection import detect_unknown
from cluster.sweep_record import Configuration, SweepFolder, SweepSettings
from procap.classifier import unit
from procap.text import LabelSpace
from runner.config import EvalSettings, RunConfig, Target
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.evaluate import score_images
from runner.planning import plan_run
from runner.provenance import provenance
from runner.results import ScoreResult, write_json
from runner.run_collection import Collection, write_collection
from runner.tracking.exporter import Exporter
from shards.catalogue import UNLABELLED
from shards.raw.published import find_location, read_published
from shards.reader import open_dataset
from shards.transforms import EvalTransform

KNOWN, NOVEL = Target("digits", "base"), Target("digits", "novel")


def plan(checkpoint: str) -> RunConfig:
    return plan_run(method="zeroshot", dataset="digits", backbone=checkpoint)


def made_score(config: RunConfig, target: str, scores: list[float], of: int | None = None, **more: str) -> ScoreResult:
    return ScoreResult(
        config_hash=config.hash, target=str(Target.parse_unchecked(target)), total=len(scores),
        limit=len(scores) if of else None, dataset_size=of or len(scores), precision="fp32",
        manifest_digest="e" * 16, backbone_digest="b" * 16, checkpoint_sha256=f"{config.hash:0<64}",
        **provenance({}), scores=scores, **more,
    )  # fmt: skip


def put_scores(
    results: Path, config: RunConfig, target: str, scores: list[float], of: int | None = None, **more: str
) -> None:
    file = results / config.path / "scores" / Target.parse_unchecked(target).file(EvalSettings())
    write_json(file, made_score(config, target, scores, of, **more))


@pytest.fixture
def made(tmp_path) -> Path:
    """A run with three known images, and four of a set whose two last have the score of a known one."""
    config = put_run(tmp_path, "maple", "digits")
    put_score(tmp_path, config, "digits:base", 2, 3)
    put_scores(tmp_path, config, "digits:base", [0.5, 0.4, 0.3])
    put_scores(tmp_path, config, "tiles", [0.45, 0.1, 0.3, 0.3])
    put_scores(tmp_path, config, "shapes", [0.1, 0.2], of=9)
    return tmp_path


def test_auroc_counts_ties_by_half_and_fpr95_keeps_all_known_images(made):
    """Of 12 pairs, 0.5 wins four, 0.4 three, and 0.3 one and two halves: 9 / 12. At 0.3 three of four are let in."""
    [unknown] = load(made).unknown
    assert (unknown["tiles:all:test"].auroc, unknown["tiles:all:test"].fpr95) == (pytest.approx(75.0), 75.0)
    assert (unknown["shapes:all:test"].auroc, unknown["shapes:all:test"].fpr95) == (100.0, 0.0)
    assert [unknown[f"{name}:all:test"].limited for name in ("tiles", "shapes")] == [False, True]


@pytest.mark.parametrize(("name", "changes"), [
    ("tiles-all-test", {"checkpoint_sha256": "0" * 64}),
    ("tiles-all-test.squash", {"settings": {"resize": "squash"}}),
])  # fmt: skip
def test_scores_of_other_weights_or_settings_are_compared_with_none(made, name, changes):
    [file] = made.rglob("scores/tiles*")
    file.with_name(f"{name}.json").write_text(json.dumps(json.loads(file.read_text()) | changes))
    if "squash" in name:
        file.unlink()
    [unknown] = load(made).unknown
    assert [*unknown] == ["shapes:all:test"]


def test_the_table_and_the_page_show_them(made, capsys):
    code, text, _ = run(capsys, "table", "--results", made)
    assert code == 0 and "† --limit" in text.partition("**Unknown images**")[2]
    [row] = [line for line in text.splitlines() if line.startswith("| digits:base:test")]
    assert [cell.strip() for cell in row.split("|")[3:7]] == ["100.00 †", "0.00 †", "75.00", "75.00"]
    code, _, _ = run(capsys, "report", "--results", made)
    assert code == 0 and (made / "report/figures/unknown-scores.svg").stat().st_size > 1000


def test_a_mean_without_a_limited_seed_names_the_others(made, capsys):
    second = put_run(made, "maple", "digits", seed=2)
    put_score(made, second, "digits:base", 2, 3)
    put_scores(made, second, "digits:base", [0.5, 0.4, 0.3])
    put_scores(made, second, "shapes", [0.1, 0.2])
    [limited] = made.rglob("seed1-*/scores/tiles*")
    limited.unlink()
    _, text, _ = run(capsys, "table", "--results", made)
    assert "†" not in (table := text.partition("**Unknown images**")[2]) and "Seed 2." in table


def test_the_page_of_a_sweep_shows_them(made, capsys):
    [config] = load(made).config
    settings = SweepSettings(name="rates", space={"lr": [0.1]}, methods=("maple",), datasets=("digits",), seeds=(1,))
    finished = Configuration(values={"lr": 0.1}, runs=(config.path,), state="finished", scores={config.path: 50.0})
    SweepFolder(made / "sweeps/rates").save(settings, [finished])
    write_collection(made, Collection(kind="sweep", name="rates", runs=(config.path,), status="finished"))
    code, _, _ = run(capsys, "report", "rates", "--results", made)
    assert code == 0 and (made / "report-rates/figures/unknown-scores.svg").stat().st_size > 1000


def test_scores_are_the_highest_softmax_of_plain_cosines(few_digits, short_checkpoint, tmp_path):
    runtime, config = make_runtime(few_digits, tmp_path), plan(str(short_checkpoint))
    train(config, runtime)
    # Novel images, among the names of the base classes.
    scored = score_images(make_run(config, runtime), NOVEL)
    loaded, dataset = load_trained(config, runtime), open_dataset(few_digits, "digits")
    clip, space = loaded.clip, loaded.method.space
    assert isinstance(space, LabelSpace) and space.classnames == dataset.classnames[:5]
    transform = EvalTransform(32, clip.preparation.mean, clip.preparation.std)
    test = dataset.open_images("test")
    images = torch.stack([transform(test.image(i)) for i in range(len(test)) if test.labels[i] >= 5])
    text = unit(clip.encode_text(clip.tokenize(space.prompts())))
    cosines = unit(clip.encode_image(images)) @ text.t()
    assert scored.scores == pytest.approx(cosines.softmax(dim=1).amax(dim=1).tolist(), rel=1e-5)
    assert only_run(tmp_path).read_results(ScoreResult) == [scored]
    # A file that is there is read, one of other weights is replaced.
    file = only_run(tmp_path).result_file(NOVEL, model=ScoreResult)
    written = file.stat().st_mtime_ns
    assert score_images(make_run(config, runtime), NOVEL) == scored and file.stat().st_mtime_ns == written
    write_json(file, json.loads(file.read_text()) | {"checkpoint_sha256": "0" * 64})
    again = score_images(make_run(config, runtime), NOVEL)
    assert (again.scores, again.checkpoint_sha256) == (scored.scores, scored.checkpoint_sha256)


def scores_of_a_rank(data: str, results: str, checkpoint: str) -> None:
    runtime = make_runtime(data, results)
    with init_process_group(ranks_from_environment(), torch.device("cpu")) as group:
        train(plan(checkpoint), runtime, group=group)
        score_images(make_run(plan(checkpoint), runtime, group), NOVEL)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_several_processes_write_the_scores_of_one(few_digits, short_checkpoint, tmp_path, size):
    alone = make_runtime(few_digits, tmp_path / "one")
    train(plan(str(short_checkpoint)), alone)
    expected = score_images(make_run(plan(str(short_checkpoint)), alone), NOVEL)
    run_ranks(size, scores_of_a_rank, str(few_digits), str(tmp_path / "several"), str(short_checkpoint))
    [result] = only_run(tmp_path / "several").read_results(ScoreResult)
    assert result.scores == expected.scores


def test_a_limit_marks_scores_and_never_replaces_those_of_all_images(
    few_digits, short_checkpoint, tmp_path, monkeypatch
):
    config, posted = plan(str(short_checkpoint)), []
    train(config, make_runtime(few_digits, tmp_path))
    monkeypatch.setattr(Exporter, "post", lambda _, path: posted.append(path))
    limited = make_run(config, make_runtime(few_digits, tmp_path, limit=3))
    assert score_images(limited, NOVEL).limited and len(score_images(limited, NOVEL).scores) == 3
    whole = score_images(make_run(config, make_runtime(few_digits, tmp_path)), NOVEL)
    assert not whole.limited and score_images(limited, NOVEL) == whole
    with pytest.raises(Exception, match="counts fewer: leave out --limit"):
        score_images(limited, NOVEL, force=True)
    assert not posted, "MLflow has no scores"
    assert evaluate(config, KNOWN, make_runtime(few_digits, tmp_path)).total > 0 and posted == [config.path]


def test_a_classifier_with_its_own_score_is_scored_by_that_under_its_name(few_digits, short_checkpoint, tmp_path):
    runtime = make_runtime(few_digits, tmp_path)
    config = plan_run(
        method="gallop", dataset="digits", shots=2, backbone=str(short_checkpoint), overrides={"epochs": 1}
    )
    train(config, runtime)
    scored, loaded = score_images(make_run(config, runtime), NOVEL), load_trained(config, runtime)
    test, transform = (
        open_dataset(few_digits, "digits").open_images("test"),
        EvalTransform(32, loaded.clip.preparation.mean, loaded.clip.preparation.std),
    )
    images = torch.stack([transform(test.image(i)) for i in range(len(test)) if test.labels[i] >= 5])
    classifier = loaded.method.classifier()
    with torch.inference_mode():
        expected = classifier.score(classifier.encode(images))
    assert scored.score == "GL-MCM" and scored.scores == pytest.approx(expected.tolist(), rel=1e-5)


def test_tables_name_a_score_that_is_not_the_common_one(made, capsys):
    config = put_run(made, "gallop", "digits")
    put_score(made, config, "digits:base", 2, 3)
    for target, scores in {"digits:base": [1.5, 1.4], "tiles": [0.5, 1.6]}.items():
        put_scores(made, config, target, scores, score="GL-MCM")
    found = {row.method: row.unknown["tiles:all:test"] for row in load(made).itertuples()}
    assert {method: detection.unknown.score for method, detection in found.items()} == {
        "maple": "MCM",
        "gallop": "GL-MCM",
    }
    _, text, _ = run(capsys, "table", "--results", made)
    assert "GalLoP has its own score, GL-MCM." in text and "MaPLe has its own" not in text


def test_the_command_takes_a_folder_of_images_of_no_class(few_digits, short_checkpoint, tmp_path, capsys):
    (tmp_path / "photos" / "deeper").mkdir(parents=True)
    for number in range(3):
        pixels = np.full((40, 50, 3), 80 * number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / ("deeper" if number else "") / f"{number}.png")
    text = {"name": "holiday", "template": "a photo of a {}.", "folder": "photos", "classes": "none"}
    (tmp_path / "holiday.yaml").write_text(yaml.safe_dump(text))
    data = tmp_path / "data"
    assert run(capsys, "data", "pack", tmp_path / "holiday.yaml", "--data", data)[0] == 0
    assert open_dataset(data, "holiday").open_images("test").paths == ["0.png", "deeper/1.png", "deeper/2.png"]
    (data / "digits").symlink_to(few_digits / "digits")
    chosen = ("--methods", "zeroshot", "--datasets", "digits", "--backbone", short_checkpoint)
    place = ("--data", data, "--results", tmp_path / "results", "--tracking", "off")
    code, text, _ = run(capsys, "eval", *chosen, *place, "--unknown", "holiday,digits:novel", "--json")
    [first, second] = json.loads(text.splitlines()[-1])["unknown"]
    assert code == 0 and [first["unknown"], second["unknown"]] == ["holiday:all:test", "digits:novel:test"]
    # The run's own images are evaluated as well, so that the scores have a row.
    [row] = load(tmp_path / "results").itertuples()
    detection = row.unknown["holiday:all:test"]
    assert detection.auroc == first["auroc"] and len(detection.unknown.scores) == 3
    part = ("--data", data, "--results", tmp_path / "part", "--tracking", "off", "--limit", "2")
    code, text, _ = run(capsys, "eval", *chosen, *part, "--unknown", "holiday")
    assert code == 0 and text.partition("AUROC")[2].count("†") == 2
    for trained in ("digits", "digits:base", "digits:dev-base"):
        refused = run(capsys, "eval", *chosen, *place, "--unknown", trained)
        assert refused[0] == 2 and "was trained on classes of it" in refused[2]


def test_the_sets_of_mos_say_where_they_come_from_and_have_one_class():
    sizes = {"ood-inaturalist": 10_000, "ood-sun": 10_000, "ood-places": 10_000, "ood-textures": 5640}
    assert {dataset.name: dataset.counts["test"] for dataset in UNLABELLED} == sizes
    for dataset in UNLABELLED:
        assert dataset.num_classes == 1 and dataset.test_only and dataset.raw.archives[0].md5
        assert "no label here" in dataset.description and "http" in dataset.raw.get and "http" in dataset.licence


@pytest.mark.parametrize(("change", "message"), [
    ({"split": "test"}, "classes: none takes a folder, and no table or split"),
    ({"folder": None, "table": "labels.csv"}, "classes: none takes a folder, and no table or split"),
])  # fmt: skip
def test_images_of_no_class_have_no_table_and_no_split(change, message, tmp_path, capsys):
    keys = {"name": "holiday", "template": "a photo of a {}.", "folder": "photos", "classes": "none"} | change
    (tmp_path / "holiday.yaml").write_text(yaml.safe_dump({key: value for key, value in keys.items() if value}))
    code, _, said = run(capsys, "data", "pack", tmp_path / "holiday.yaml", "--data", tmp_path)
    assert code == 1 and message in said


def test_the_images_of_a_set_without_classes_are_listed_by_name_at_any_depth(tmp_path):
    for name in ("b.jpg", "a/c.jpg", "notes.txt"):
        file = tmp_path / "iNaturalist" / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    listing = read_published(find_location(UNLABELLED[0], tmp_path))
    assert (listing.classnames, listing.splits) == (("unknown",), {"test": [("a/c.jpg", 0), ("b.jpg", 0)]})


def test_a_histogram_has_the_known_images_of_all_seeds_once():
    config = plan_run(method="zeroshot", dataset="digits")
    scores = {
        "digits:base:test": [[0.5, 0.7], [0.6, 0.8]],
        "holiday:all:test": [[0.1], [0.2]],
        "tiles:all:test": [[0.2], [0.3]],
    }
    seeds = [
        detect_unknown(KNOWN, [made_score(config, name, of[i]) for name, of in scores.items()], EvalSettings())
        for i in range(2)
    ]
    frame = pd.DataFrame({"target": str(KNOWN), "title": "CLIP", "unknown": seeds})
    long = [frame.assign(title=f"CLIP (zero-shot), evaluation squash, {samples} samples") for samples in range(2, 5)]
    figure = draw_styled(partial(score_histograms, pd.concat([frame, *long])))
    figure.draw_without_rendering()
    texts = [text for panel in figure.axes for text in panel.findobj(Text) if "CLIP" in text.get_text()]
    titles = [text.get_window_extent() for text in texts]
    assert len(titles) == 4 and all(left.x1 < right.x0 for left, right in itertools.pairwise(titles))
    panel = figure.axes[0]
    drawn = {stairs.get_label(): stairs.get_data().values for stairs in panel.patches}
    shares = {name: values[values > 0].tolist() for name, values in drawn.items()}
    assert shares == {"known": [0.25] * 4, "holiday": [0.5] * 2, "tiles": [0.5] * 2}
