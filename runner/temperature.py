"""Fit the temperature of a run on its few-shot images: one number that divides its logits.

A trained method is confident on the images that it has learned. Therefore each image is predicted by a training on the
other folds: with F folds, fold k has the images k, k + F, ... of each class, in drawn order. These trainings lie in
the hidden folder `.folds` of the run. Shapes: N few-shot images, C classes trained on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from runner.distributed.ranks import Ranks
from runner.engine import fitting_threads
from runner.inference import prepare_inference
from runner.session import Run
from runner.setup import make_test_transform
from runner.stop_signals import StopRequest
from runner.train import train_run
from runner.trained_runs import load_trained
from shards.image_selection import select_training_images, split_fold
from shards.reader import ImageList
from shards.uneven_samples import BALANCED

FOLDS = 4
LOWEST, HIGHEST = 0.05, 20.0
"""Bounds: if all held-out images are right, a temperature of zero fits them best."""
DECIMALS = 4
"""A temperature is rounded to these decimals, which the last bits of logits hardly ever change."""


def fit_temperature(run: Run, stop: StopRequest, *, force: bool = False) -> float:
    """Fit a run's temperature by cross-validation over shots, and keep it for its further targets; all ranks call this.

    Every image is held out once, unless it is the only one of its class. A method without training has one prediction
    of all of them. force: train the folds again.
    """
    if run.temperature is None:
        config, session = run.config, run.session
        dataset, folds = session.dataset(config.dataset), min(FOLDS, config.shots) if config.recipe.epochs else 0
        # A run without training is one for all samplings.
        sampling = config.sampling if folds else BALANCED
        images = select_training_images(dataset, config.shots, config.seed, config.classes, sampling).train
        trainings, parts = session.elsewhere(run.folder.path / ".folds", tracking_uri="off"), []
        for fold in (f"{number}/{folds}" for number in range(1, folds + 1)):
            stop.check_ranks(session.group, f"stopped the temperature of {run.path}; it goes on when repeated")
            fold_run = trainings.get_run(config.model_copy(update={"held_out": fold}))
            train_run(fold_run, force=force)
            parts.append((fold_run, split_fold(images, fold)[1]))
        parts = parts or [(run, images)]
        logits = np.concatenate([_compute_logits(*part) for part in parts])
        labels = np.concatenate([held_out.labels for _, held_out in parts])
        # All ranks have computed the same, but for their hardware.
        run.temperature = session.group.broadcast_object(minimize_nll(logits, labels))
    return run.temperature


def minimize_nll(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Find the temperature T that minimises the mean NLL of logits [N, C] / T and labels [N]; one minimum exists."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    def nll(log_temperature: float) -> float:
        return -log_softmax(logits / math.exp(log_temperature), axis=1)[np.arange(len(labels)), labels].mean()

    best = minimize_scalar(nll, bounds=np.log([LOWEST, HIGHEST]), method="bounded", options={"xatol": 1e-8}).x
    return round(math.exp(best), DECIMALS)


def _compute_logits(run: Run, images: ImageList) -> NDArray[np.float64]:
    """Compute logits [N, C] of images under the settings of the evaluation."""
    session, method, batch_size = run.session, load_trained(run).method, run.config.recipe.test_batch_size
    transform = make_test_transform(method, run.config.dataset, run.config.seed, run.eval_settings.resize)
    with fitting_threads(method.clip, min(batch_size, len(images)), "eval"):
        inference = prepare_inference(run, images, method.space)
        # They are few: each rank predicts all, so that the number of ranks does not change the size of a batch.
        batches = inference.batches(images, transform, batch_size, session.decoders, Ranks())
        rows = torch.cat([inference(pixels) for pixels, _ in batches])
        logits = inference.adapt(rows, run.config.seed) if inference.is_online else rows
    return logits.double().cpu().numpy()
