"""Score images by how well they fit the classes of a run, to tell images of unknown classes from known ones.

Maximum concept matching: the highest softmax probability of a class name, of cosines that no factor scales. Logits are
divided by the method's factor, so that those of a cosine classifier are the cosines.
Source: Ming et al. 2022, "Delving into Out-of-Distribution Detection with Vision-Language Representations", section 3,
and its public code, both at temperature 1. A classifier with a score of its own, such as GalLoP's, is scored by that.
"""

from __future__ import annotations

from runner.config import Target
from runner.evaluate import find_result, predict_images
from runner.inference import LogitSettings
from runner.meters import Meter
from runner.provenance import describe_environment, provenance
from runner.results import MCM, ScoreResult, write_json
from runner.session import Run
from runner.setup import make_test_transform
from runner.stop_signals import StopRequest
from runner.trained_runs import load_trained, prepare_inference
from shards.image_selection import select_target_images


def score_run(run: Run, target: Target, *, force: bool = False) -> ScoreResult:
    """Score the images of `target`, whatever they show, among the classes of a finished run; writes a file in `scores`.

    An existing result is returned, and errors are raised, as by `evaluate_run`; all ranks of a group call this.
    """
    session = run.session
    session.remote.pull(run.path)
    if existing := find_result(run, target, run.folder.read_scores, force=force):
        return existing
    with StopRequest() as stop:
        result = _score(run, target, stop)
        if session.is_first:
            write_json(run.folder.score_file(target, result.settings), result)
            session.remote.push(run.path)
        result = session.group.broadcast_object(result)
        stop.check(f"scored {target} by {run.path}")
    return result


def _score(run: Run, target: Target, stop: StopRequest) -> ScoreResult:
    config, session, trained = run.config, run.session, load_trained(run)
    runtime, shards = session.runtime, session.dataset(target.dataset)
    session.group.check_same(f"the content of {target.dataset}", shards.manifest.digest)
    settings, selection = runtime.evaluation.for_run(config), select_target_images(shards, target.classes, target.split)
    count = min(len(selection.images), runtime.limit or len(selection.images))
    # Known and unknown images have equal views, whatever set the unknown ones are from.
    transform = make_test_transform(trained.method, config.dataset, config.seed, settings.resize)
    # Their labels are no classes of the run; predictions need some that are.
    relabel = dict.fromkeys(range(len(selection.classnames)), 0)
    images = session.crops.wrap(selection.images.subset(range(count), relabel), transform)
    meter = Meter(session.device, warmup=0)
    scoring = LogitSettings(temperature=float(trained.method.scale()), score=MCM)
    inference = prepare_inference(run, images, trained.method.space, meter, scoring)
    predictions = predict_images(run, inference, transform, target, meter, stop)
    return ScoreResult(
        config_hash=config.hash,
        target=str(target),
        total=count,
        limit=runtime.limit,
        dataset_size=len(selection.images),
        precision=inference.precision,
        settings=settings,
        manifest_digest=shards.manifest.digest,
        backbone_digest=trained.training.backbone_digest,
        checkpoint_sha256=trained.training.checkpoint_sha256,
        **provenance(describe_environment(session.device)),
        score=inference.scoring.score,
        # Of a thousand classes all scores lie near 0.001, so that decimals would not tell them apart.
        scores=[float(f"{score:.6g}") for score in predictions.confidence],
    )
