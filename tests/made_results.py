"""Result folders with counts made up, as a finished run and its evaluations leave them."""

import random

from benchmarks.experiment.profiles import MINI
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import load_suite
from runner.config import Target
from runner.planning import plan_run
from runner.provenance import provenance
from runner.results import EpochLog, EvalResult, PerClass, TrainResult, write_json
from runner.run_folders import RunFolder


def put_run(results, method, dataset, *, seed=1, seconds=12.5, **plan):
    """A finished training; its losses fall from 2 towards 1."""
    return put_config(results, plan_run(method=method, dataset=dataset, seed=seed, **plan), seconds=seconds)


def put_config(results, config, *, seconds=12.5):
    """The same of a configuration that is there already, such as that of a suite's run."""
    folder = RunFolder(results / config.path)
    epochs = [
        EpochLog(epoch=epoch, lr=0.1, terms={"ce": 1 + 1 / (epoch + 1)}, seconds=1.0, images_per_second=100.0)
        for epoch in range(config.recipe.epochs)
    ]
    write_json(folder.config_file, config)
    write_json(
        folder.train_file,
        TrainResult(
            config_hash=config.hash, steps=10 * len(epochs), images=160 * len(epochs), epochs=epochs,
            seconds=seconds, images_per_second=100.0 if epochs else None,
            images_per_second_model=125.0 if epochs else None, warmup_steps=0, phases={},
            trainable_parameters=2048, fewshot=None, manifest_digest="d" * 16,
            checkpoint_sha256=f"{config.hash:0<64}", backbone_digest="b" * 16, **provenance({}),
        ),
    )  # fmt: skip
    return config


def put_score(results, config, target, correct, total, *, of=None, rate=200.0, checkpoint=None, by_class=None):
    """An evaluation: `correct` of `total` images, which are the first of `of` where it is limited.

    by_class: lists of the correct images and of all images of each class; otherwise there is one class.
    """
    right, images = by_class or ([correct], [total])
    at = Target.parse_unchecked(target)
    file = RunFolder(results / config.path).result_file(at)
    write_json(
        file,
        EvalResult(
            config_hash=config.hash, target=str(at), correct=correct, total=total,
            per_class=PerClass(correct=right, total=images), limit=total if of else None,
            dataset_size=of or total, num_classes=len(images), precision=config.precision, batch_size=100, workers=0,
            seconds=total / rate, images_per_second=rate, images_per_second_model=2 * rate,
            manifest_digest="d" * 16, backbone_digest="b" * 16,
            checkpoint_sha256=checkpoint or f"{config.hash:0<64}", **provenance({}),
        ),
    )  # fmt: skip
    return file


def answer_fields(right):
    """The fields of an evaluation with one class whose images `right` [N] are predicted, or taken for another class."""
    counts = {"correct": [int(right.sum()), 0], "total": [len(right), 0]}
    return {
        "num_classes": 2,
        "per_class": counts,
        "labels": [0] * len(right),
        "predicted": (~right).astype(int).tolist(),
    }


def put_halves(results, method, dataset, base, novel, **plan):
    """A run with both halves evaluated: (correct, total) of each."""
    config = put_run(results, method, dataset, **plan)
    put_score(results, config, f"{dataset}:base", *base)
    put_score(results, config, f"{dataset}:novel", *novel)
    return config


def made(results, name, profile=MINI, *, skip=lambda entry, target: False, low=300, **chosen):
    """A suite with results of random counts, but for those to `skip`."""
    suite = load_suite(name) if isinstance(name, str) else name
    options = suite.options(profile, **chosen)
    rng = random.Random(suite.name)
    for entry in {entry.path: entry for entry in suite.plan(options)}.values():
        put_config(results, entry.spec.config)
        for target in entry.spec.targets:
            total = rng.randint(311, 419)
            if not skip(entry, target):
                put_score(results, entry.spec.config, target, rng.randint(low * total // 1000, total - 7), total)
    return SuiteResults.read(suite, options, results)


def table_of(done, name):
    [table] = [table for table in done.make_tables() if table.name == name]
    return table
