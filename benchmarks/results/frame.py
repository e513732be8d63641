"""Load results as one pandas DataFrame: `load` for scripts, `read_frame` and `make_records` for tables and reports."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.console.output import plural
from benchmarks.experiment.titles import describe_settings, order_in, title_variants
from benchmarks.results.detection import MEASURES, detect_unknown, measure_open_world
from procap.errors import UserError
from procap.methods import data_use
from runner.config import EvalSettings, RunConfig, Target
from runner.planning import known_target
from runner.results import EvalResult, ScoreResult, TrainResult
from runner.run_collection import COLLECTIONS, read_collection
from runner.run_folders import RUNS, OnError, RunFolder, find_runs, locate_run

if TYPE_CHECKING:
    import pandas as pd

Selected = Callable[[str, RunConfig | None, EvalSettings], bool]
"""Whether results of a run under some settings are selected, by the run's path below the results and its configuration;
None: whether they can be. Under the default settings: whether the run is."""


def load(results: str | Path, suite: str | None = None, *, evaluation: str | None = "") -> pd.DataFrame:
    """Load every evaluation of every finished run, one row per run and target.

    results: a results folder, or a URL of one (`s3://...`), of which the documents are copied to the cache first.
    suite: only runs of the collection that `procap bench SUITE` has recorded there. Of results without training that
        differ only in seed or shots, where these change nothing, one is loaded.
    evaluation: only results under these settings, named as in the column `evaluation`; empty: the default settings;
        None: all, with one row per run, target and settings.

    Columns:

        path, hash            the run's folder below `results`; the first 8 digits of its configuration's SHA-256
        method, variant       the method's name; a title that distinguishes settings of one method within this frame
        config                the `runner.config.RunConfig`
        options, settings     dicts: the method's options; as texts, all that tells rows apart except data set, target
                              and seed: settings of run and evaluation, recipe (`recipe.lr`), code, files
        dataset, classes      what was trained on: data set; all, base, novel, dev-base or dev-novel
        shots, seed           training images per class, 0 for all; seed of the samples and of the training
        sampling              their rule: balanced, decay:0.06, natural or natural-any
        backbone, pretrained, precision, recipe, epochs
        target                what was evaluated, `dataset:classes:split`
        target_dataset, target_classes, split
        correct, total        integer counts of images
        accuracy              100 * correct / total
        macro_accuracy        mean of the classes' accuracies in percent
        nll, brier            negative log-likelihood (nats) and Brier score (0 to 2), means over images; with
        ece                   expected calibration error in percent, in 15 bins of equal width,
                              as `runner.calibration` defines them
        calibration           the `runner.calibration.Calibration` with the counts of the bins
        per_class             the `runner.results.PerClass`: counts by class, and the classes' names
        images, limited       images of the target, and whether only its first `total` images were evaluated
        evaluation            settings of the evaluation that differ from the default, as `fp32, squash, 8 samples`
        temperature           what divided the logits, fitted on few-shot images; 1 without `--temperature`
        depends_on_seed       whether the result does; else it counts for every seed
        fps, fps_model        evaluated images per second with and without decoding
        labelled, unlabelled, names, models
                              what the method looks at, as `procap.methods.data_use.DataUse` defines it
        chosen_on_test        whether weights or settings were chosen by test accuracy (option selection = test)
        imported              whether the weights were imported from a checkpoint of public code
        imported_file         first 8 hex digits of the SHA-256 of that checkpoint; empty for none
        source                package, version and digest of the code of the method; empty for imported weights
        group                 8 hex digits, equal for results that differ in data set, target and seed alone
        parameters            number of learned parameters
        train_seconds         NaN for a method that trains nothing, and for imported weights
        steps                 of the optimizer; 0 for a method that trains nothing, and for imported weights
        gradient_norms        norms of the weighted loss terms' gradients at the end, by term; {} if not recorded
        losses                the method's first loss term, mean over the steps of each epoch, a list
        manifest              digest of the packed test set: equal digests are equal images in equal order
        contents              digests of the data sets that were used, by name: trained on, and evaluated
        backbone_digest       of the backbone's weights
        written               when the evaluation was written, UTC, as 2026-01-31T12:00:00Z
        correct_images        which images were right [total]; None if not recorded
        wrong_images          true and predicted labels [2, total - correct] of the others, in order
        labels, predicted     true and predicted label of each image [total]; None if not recorded, as
        confidence            the probability of the predicted label, six decimals; and
        base_confidence       where the target has classes beside those trained on: the highest probability of those
        base_among_all, novel_among_all
                              of a run trained on base classes and evaluated on all: accuracy of base and novel images,
        auroc, fpr95          of base against novel images, and
        openworld_auc         as `benchmarks.results.detection` defines them, in percent; NaN for other rows
        unknown               of the classes trained on: a `benchmarks.results.detection.Detection`, with `auroc`
                              and `fpr95`, by each target of `eval --unknown`; {} for none, and for other rows

    Warns of each run that is left out because a file of it is broken, or an evaluation used other weights than it has
    now. Raises UserError if there is no such folder or suite, or if images of a data set or weights of a backbone
    differ between results.
    """
    root = open_results(results)
    runs, broken = None, dict[str, UserError]()
    if suite is not None:
        collection = read_collection(root / COLLECTIONS / "suite" / suite)
        if collection is None:
            raise UserError(f"no suite {suite} at {results}; run it: procap bench {suite} --results {results}")
        runs = collection.runs
    frame = read_frame(root, broken.__setitem__, lambda path, *_: runs is None or path in runs, evaluation)
    for path, error in broken.items():
        warnings.warn(f"{path} is left out: {error}", stacklevel=2)
    frame = drop_equal(frame)
    check_contents(frame)
    return frame


def drop_equal(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep one of the results without training that differ only in a seed or shots by which nothing is drawn."""
    # As text, because the dicts in `settings` cannot be hashed.
    columns = frame[["method", "dataset", "target", "manifest", "settings", "limited"]].astype(str)
    columns["seed"] = frame.seed.where(frame.depends_on_seed, 0)
    return frame[~columns.duplicated() | (frame.epochs > 0)]


def open_results(results: str | Path) -> Path:
    """Return the local folder of `results`; for a URL, a copy of its documents. Raises UserError if there is none."""
    from runner.remote_results import RemoteResults, results_root
    from shards.default_paths import cache_home

    folder, url = results_root(str(results), cache_home())
    # Does nothing for a local folder.
    RemoteResults(url, folder).pull()
    if not folder.is_dir():
        raise UserError(f"no results folder at {results}; name the one of your runs with --results")
    return folder


def read_frame(results: Path, on_error: OnError, selected: Selected, evaluation: str | None = None) -> pd.DataFrame:
    """Load a local folder as `load` does, all settings by default; `on_error` gets the runs that cannot be read.

    Warns of runs that are not finished, and of those at another depth of the folder, which have no rows.
    """
    deeper = [file.parent for file in sorted(results.glob(f"*/{RUNS}/config.json"))]
    deeper = [path for path in deeper if selected("/".join(path.parts[-6:]), None, EvalSettings())]
    folders = list_selected_runs(results, on_error, selected)
    unfinished = [folder.path for folder, _ in folders if not folder.train_file.exists()]
    for why, paths in {"is not finished": unfinished, "is deeper in the folder": deeper}.items():
        if paths:
            warnings.warn(f"{plural(len(paths), 'run')} left out, such as {paths[0]}, which {why}", stacklevel=3)
    records = read_records(folders, on_error, selected)
    return make_frame(record for record in records if evaluation in (None, record["evaluation"]))


def read_records(
    folders: Iterable[tuple[RunFolder, RunConfig]], on_error: OnError, selected: Selected
) -> Iterator[dict[str, Any]]:
    """Make the rows of the selected results of finished runs; `on_error` gets the runs that cannot be read."""
    for folder, config in folders:
        try:
            if training := folder.read_training():
                shown = [each for each in folder.read_evaluations() if selected(config.path, config, each.settings)]
                yield from list(make_records(folder, config, training, shown))
        except UserError as error:
            on_error(config.path, error)


def list_selected_runs(results: Path, on_error: OnError, selected: Selected) -> list[tuple[RunFolder, RunConfig]]:
    """List the selected runs below `results`; `on_error` gets those that were moved or are broken."""
    runs = []
    for folder in find_runs(results):
        path = folder.path.relative_to(results).as_posix()
        if not selected(path, None, EvalSettings()):
            continue
        try:
            # `locate_run` raises for a run that was moved; it resolves links, which most folders need not pay for.
            if (config := folder.read_config()) is None or config.path != path:
                config, _ = locate_run(folder.path)
            if selected(path, config, EvalSettings()):
                runs.append((folder, config))
        except UserError as error:
            on_error(path, error)
    return runs


def make_records(
    folder: RunFolder, config: RunConfig, training: TrainResult, evaluations: Iterable[EvalResult]
) -> Iterator[dict[str, Any]]:
    """Make a row of the frame from each evaluation of a run, without `variant` and MEASURES, which depend on others.

    Raises UserError if an evaluation used other weights than the run has now.
    """
    run = _columns_of_run(config, training)
    run_settings = describe_settings(config) | _describe_training(folder, config, training)
    known = known_target(config)
    scores = [each for each in folder.read_results(ScoreResult) if each.is_current(training, each.limit)]
    for result in evaluations:
        if not result.is_current(training, result.limit):
            under = f" under {result.settings.name}" if result.settings.name else ""
            raise UserError(
                f"{folder.path} was evaluated on {result.target}{under} with other weights than it holds now; "
                f"repeat it: procap eval {folder.path} --targets {result.target} --force"
            )
        target, calibration = Target.parse_unchecked(result.target), result.calibration
        limit = {"limit": str(result.limit)} if result.limited else {}
        read = result.settings.sample_fields(config)
        shots = {"shots": str(config.shots or "full")} if "shots" in read else {}
        unknown = detect_unknown(known, scores, result.settings) if target == known else {}
        digests = {Target.parse_unchecked(name).dataset: each.unknown.manifest_digest for name, each in unknown.items()}
        # With those of the evaluation, so that titles name them as they do varied options.
        row_settings = run_settings | shots | {"evaluation": result.settings.name or "default", **limit}
        result_fields = ("correct", "total", "accuracy", "macro_accuracy", "per_class", "calibration", "limited")
        yield {
            **run,
            **{name: getattr(result, name) for name in (*result_fields, "backbone_digest", "written")},
            "settings": row_settings,
            "group": digest_of([config.method, row_settings]),
            "target": str(target),
            "target_dataset": target.dataset,
            "target_classes": target.classes,
            "split": target.split,
            "nll": calibration.nll if calibration else math.nan,
            "brier": calibration.brier if calibration else math.nan,
            "ece": calibration.equal_width.ece if calibration else math.nan,
            "images": result.dataset_size,
            "evaluation": result.settings.name,
            "temperature": result.temperature or 1.0,
            "depends_on_seed": "seed" in read,
            "fps": result.images_per_second or math.nan,
            "fps_model": result.images_per_second_model or math.nan,
            "manifest": result.manifest_digest,
            # One entry if both are the same data set, with the digest of what was evaluated.
            "contents": digests | {config.dataset: training.manifest_digest, target.dataset: result.manifest_digest},
            "correct_images": result.correct_images(),
            "wrong_images": result.wrong_images(),
            **{name: None if (values := getattr(result, name)) is None else np.array(values) for name in OF_IMAGES},
            "unknown": unknown,
        }


def _columns_of_run(config: RunConfig, training: TrainResult) -> dict[str, Any]:
    run_fields: tuple[str, ...] = ("path", "hash", "method", "dataset", "classes", "shots", "sampling", "seed")
    run_fields += ("backbone", "pretrained", "precision", "options", "chosen_on_test")
    return {
        **{name: getattr(config, name) for name in run_fields},
        "config": config,
        "recipe": config.recipe_name,
        "epochs": config.recipe.epochs,
        **asdict(data_use(config.method, config.options)),
        "imported": training.imported is not None,
        "imported_file": training.imported.sha256[:8] if training.imported else "",
        "source": str(training.method_source or ""),
        "parameters": training.trainable_parameters,
        "train_seconds": training.seconds if config.recipe.epochs and not training.imported else math.nan,
        "steps": training.steps,
        "gradient_norms": training.epochs[-1].gradient_norms if training.epochs else {},
        # Sums of all terms would not compare between methods with different terms.
        "losses": [next(iter(epoch.terms.values())) for epoch in training.epochs],
    }


OF_IMAGES = ("labels", "predicted", "confidence", "base_confidence")
COLUMNS = (
    *("path", "hash", "method", "variant", "config", "options", "settings", "dataset", "classes", "shots", "seed"),
    *("sampling", "backbone", "pretrained", "precision", "recipe", "epochs"),
    *("target", "target_dataset", "target_classes", "split"),
    *("correct", "total", "accuracy", "macro_accuracy", "nll", "brier", "ece", "calibration", "per_class"),
    *("images", "limited", "evaluation", "temperature", "depends_on_seed", "fps", "fps_model"),
    *("chosen_on_test", "imported", "imported_file"),
    *("labelled", "unlabelled", "names", "models"),
    *("source", "group"),
    *("parameters", "train_seconds", "steps", "gradient_norms", "losses", "manifest", "contents"),
    *("backbone_digest", "written"),
    *("correct_images", "wrong_images", *OF_IMAGES, *MEASURES, "unknown"),
)


def make_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Make a frame with all COLUMNS, even from no records."""
    import pandas as pd

    frame = pd.DataFrame(list(records), columns=[name for name in COLUMNS if name != "variant"])
    # Without rows all columns would have dtype object, which cannot be used as a mask.
    types: dict[str, type] = dict.fromkeys(("limited", "depends_on_seed", "chosen_on_test", "imported"), bool)
    frame = frame.astype(types | {"correct": int, "total": int, "accuracy": float, "fps": float})
    frame.insert(COLUMNS.index("variant"), "variant", title_variants(frame))
    frame[[*MEASURES]] = measure_open_world(frame)
    return frame


def check_contents(frame: pd.DataFrame) -> None:
    """Raise UserError if results on different images of a data set, or weights of a backbone, would be in one table."""
    runs: dict[str, dict[str, str]] = {}
    for row in frame.itertuples():
        weights = f"the weights of {row.backbone}{f' ({row.pretrained})' if row.pretrained else ''}"
        for name, digest in {**row.contents, weights: row.backbone_digest}.items():
            runs.setdefault(name, {}).setdefault(digest, row.path)
    for name, examples in runs.items():
        if len(examples) > 1:
            listed = " and ".join(f"{digest} (such as {path})" for digest, path in examples.items())
            raise UserError(
                f"results on different contents of {name} do not compare: {listed}; select runs of one content, move "
                "the others away, or repeat them with --force"
            )


def is_half(frame: pd.DataFrame) -> pd.Series:
    """Mark the rows with base or novel test images of the data set on whose base classes the run was trained."""
    is_same_set = (frame.target_dataset == frame.dataset) & (frame.split == "test")
    return is_same_set & (frame.classes == "base") & frame.target_classes.isin(["base", "novel"])


def digest_of(values: Any) -> str:
    """Return 8 hex digits of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _describe_training(folder: RunFolder, config: RunConfig, training: TrainResult) -> dict[str, str]:
    """Collect what tells trainings of one configuration apart: code, files, and the run that they started from."""
    settings = {f"file.{name}": digest[:8] for name, digest in training.files.items() if name != "init"}
    if training.method_source:
        settings["code"] = training.method_source.digest[:8]
    if config.init:
        # Each seed may start from a run of its own seed: runs count by their settings where they can be read.
        start = RunFolder(folder.path.parents[RUNS.count("/")] / config.init).read_config()
        dataset = start.dataset if start and start.dataset != config.dataset else ""
        settings["start"] = digest_of([dataset, describe_settings(start)]) if start else config.init_digest[:8]
    return settings


def dataset_order(dataset: str) -> tuple[int, str]:
    """Sort key: the order of the catalogue, user data sets at the end."""
    from shards.catalogue import CATALOGUE

    return order_in(dataset, CATALOGUE)
