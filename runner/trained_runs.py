"""Load finished runs into memory, each a `TrainedRun` (`runner.session`)."""

from __future__ import annotations

from functools import cache, partial

from procap.errors import UsageError, UserError
from procap.methods import data_use, method_class, method_source
from procap.methods.hooks import TaughtMethod
from procap.methods.method import Method
from runner.checkpoint import decode_checkpoint, load_into, read_checkpoint_bytes
from runner.devices import set_deterministic
from runner.earlier_runs import check_same_images
from runner.results import TrainResult
from runner.run_folders import locate_run
from runner.session import Run, TrainedRun
from runner.setup import build_initial_method, changed_file


def load_trained(run: Run) -> TrainedRun:
    """Load a finished run, once. Raises UserError if it is not finished, was altered, or the backbone is another."""
    if run.trained is None:
        run.trained = _load(run)
    return run.trained


def _load(run: Run) -> TrainedRun:
    config, session = run.config, run.session
    session.remote.pull(run.path, weights=True)
    training = read_current_training(run)
    if training.method_source and not method_source(config.method):
        raise UserError(f"{run.path} was trained by {training.method_source}, which is not installed here")
    file = run.folder.checkpoint_file
    # The bytes are sent, not the path, because other machines may not have rank 0's folder.
    data = session.group.call_on_first(lambda: read_checkpoint_bytes(file, training.checkpoint_sha256))
    tensors, card = decode_checkpoint(data, file)
    if session.runtime.deterministic:
        set_deterministic()
    clip = session.backbones.load(config, session.device, session.acceleration)
    # Only the first rank has compared its weights with those of the training.
    session.group.check_same(f"the digest of the weights of {config.backbone}", clip.digest())
    method = build_initial_method(config, clip, card.space)
    load_into(method, tensors, file)
    if isinstance(method, TaughtMethod):
        # Loaded when the method asks for it, once: most need no teacher any more.
        recall = cache(partial(_recall_teacher, run, training))
        method.set_teacher(lambda space: teacher.classifier(space) if (teacher := recall()) else None)
    return TrainedRun(config, training, clip, method)


def _recall_teacher(run: Run, training: TrainResult) -> Method | None:
    """Load the run that taught a finished run; None if its teacher was none. Raises UserError if it has changed."""
    teacher = load_teacher(run)
    if changed_file(run.config, training.files):
        raise UserError(f"{run.path} learned from another teacher than {run.config.options['teacher']} is now")
    return teacher


def load_teacher(run: Run) -> Method | None:
    """Load the run that is the teacher of a run; None for another teacher, or none.

    Raises UsageError for a run that has seen other images of the data set or adapts to those of a test, UserError for
    one that is not finished.
    """
    config = run.config
    cls = method_class(config.method)
    folder = cls.teacher_run(cls.Options(**config.options)) if issubclass(cls, TaughtMethod) else None
    if folder is None:
        return None
    teacher, results = locate_run(folder)
    if data_use(teacher.method).unlabelled == "test":
        # Its logits would depend on the other images of a batch.
        raise UsageError(f"{teacher.path} adapts to test images: name a run of a different method as teacher")
    check_same_images(teacher, config)
    return load_trained(run.session.elsewhere(results, shares_backbone=False).get_run(teacher)).method


def read_current_training(run: Run) -> TrainResult:
    """Read `train.json`, on all ranks. Raises UserError if it is missing, or code or backbone have changed since."""
    session = run.session
    training = session.group.call_on_first(run.read_training)
    if training is None:
        raise UserError(
            f"{run.folder.path} holds no finished training: run procap train first, or name another --results"
        )
    if why := training.changed_code(run.config):
        raise UserError(why)
    session.group.call_on_first(lambda: session.backbones.check(run.config, training))
    return training
