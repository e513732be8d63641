"""Score images by how well they fit the classes of a run, to tell images of unknown classes from known ones.

Maximum concept matching: the highest softmax probability of a class name, of cosines that no factor scales. Logits are
divided by the method's factor, so that those of a cosine classifier are the cosines.
Source: Ming et al. 2022, "Delving into Out-of-Distribution Detection with Vision-Language Representations", section 3,
and its public code, both at temperature 1. A classifier with a score of its own, such as GalLoP's, is scored by that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from procap.text import LabelSpace
from runner.config import Target
from runner.evaluate import describe_inference, obtain_result, predict_target, select_target
from runner.inference import LogitSettings
from runner.predictions import prepare_inference
from runner.results import MCM, ScoreResult
from runner.session import Run
from runner.setup import make_test_transform, unlabelled_pool
from runner.stop_signals import StopRequest
from runner.trained_runs import load_trained
from shards.image_selection import select_class_labels


def score_run(run: Run, target: Target, *, force: bool = False) -> ScoreResult:
    """Score the images of `target`, whatever they show, among the classes of a finished run; see `obtain_result`."""
    return obtain_result(run, target, ScoreResult, partial(_score, run, target), force=force)


def _score(run: Run, target: Target, stop: StopRequest) -> ScoreResult:
    config, session, method = run.config, run.session, load_trained(run).method
    selection = select_target(run, target)
    # Known and unknown images have equal views, whatever set the unknown ones are from.
    transform = make_test_transform(method, config.dataset, config.seed, run.settings.resize)
    # Their labels are no classes of the run; predictions need some that are.
    relabel = dict.fromkeys(range(len(selection.classnames)), 0)
    first = range(len(selection.images))[: session.runtime.limit]
    images = session.crops.wrap(selection.images.subset(first, relabel), transform)
    scoring = LogitSettings(temperature=float(method.scale()), score=MCM)
    inference = prepare_inference(run, images, _known_names(run), scoring)
    predictions = predict_target(run, target, inference, transform, stop)
    return ScoreResult(
        **describe_inference(run, target, selection, inference),
        score=inference.scoring.score,
        # Of a thousand classes all scores lie near 0.001, so that decimals would not tell them apart.
        scores=[float(f"{score:.6g}") for score in predictions.confidence],
    )


def _known_names(run: Run) -> LabelSpace:
    """Return the names of the run's classes; without labels it may have learned more."""
    config, space = run.config, load_trained(run).method.space
    if unlabelled_pool(config) != "all":
        return space
    shards = run.session.dataset(config.dataset)
    names = tuple(shards.classnames[label] for label in select_class_labels(shards, config.classes))
    return replace(space, classnames=names)
