"""Read the finished runs that a training starts from, and learns from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from procap.errors import UsageError, UserError
from procap.methods import method_class
from procap.methods.features import FeatureMethod
from procap.methods.method import Method
from runner.checkpoint import InitialRun, decode_checkpoint, read_checkpoint_bytes
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.collectives import ProcessGroup
from runner.evaluate import load_trained
from runner.remote_results import RemoteResults
from runner.run_folders import RunFolder, locate_run


def start_from(config: RunConfig, earlier: RunConfig, results: Path, runtime: RuntimeConfig) -> RunConfig:
    """Return `config` with the finished run `earlier`, which lies below `results`, as its start.

    Raises UsageError for a run that has seen other images of the data set: the accuracy would not be that of the shots
    or classes of `config`.
    """
    if not config.recipe.epochs or issubclass(method_class(config.method), FeatureMethod):
        raise UsageError(f"--init: {config.method} has no training on images that could start from a run")
    training = RunFolder(results / earlier.path).read_training()
    if training is None:
        raise UsageError(f"--init: {earlier.path} is not finished")
    check_same_images(earlier, config)
    # Relative where possible, so that the results can be moved together.
    is_here = results.resolve() == runtime.results.resolve()
    folder = earlier.path if is_here else (results / earlier.path).resolve().as_posix()
    return config.model_copy(update={"init": folder, "init_digest": training.checkpoint_sha256})


def check_same_images(earlier: RunConfig, config: RunConfig) -> None:
    """Raise UsageError if run `earlier` has seen images of the data set of `config` that a training of it does not."""
    if earlier.chosen_on_test:
        # Tables mark such a run, but not another one that learns from it.
        raise UsageError(f"{earlier.path} was chosen by test accuracy: train with --option selection=validation")
    images = ("classes", "shots", "seed")
    if earlier.dataset == config.dataset and any(getattr(earlier, name) != getattr(config, name) for name in images):
        raise UsageError(f"{earlier.path} has seen other images: train with its {', '.join(images)}")


def first_stage(config: RunConfig) -> RunConfig | None:
    """Return the run that `config` starts from unless it names one: its method's first stage, in the same recipe."""
    name = method_class(config.method).first_stage
    if config.init or not name or not config.recipe.epochs:
        return None
    options = {option: config.options[option] for option in method_class(name).Options.model_fields}
    return config.model_copy(update={"method": name, "options": options})


def read_initial_run(config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup) -> InitialRun | None:
    """Read the run that `config` starts from, None without one; all ranks call this.

    Raises UserError if its checkpoint is not the one that `config` was planned with.
    """
    first = first_stage(config)
    path = first.path if first else config.init
    if not path:
        return None
    folder = RunFolder(runtime.results / path)

    def read() -> tuple[bytes, str]:
        # An absolute path is in different results, which this URL does not hold.
        if not Path(path).is_absolute():
            RemoteResults.from_runtime(runtime).pull(path, weights=True)
        training = folder.read_training()
        if training is None:
            raise UserError(f"{folder.path}, from which {config.path} starts, is not finished")
        sha256 = config.init_digest or training.checkpoint_sha256
        return read_checkpoint_bytes(folder.checkpoint_file, sha256), sha256

    data, sha256 = group.call_on_first(read)
    return InitialRun(folder.path, decode_checkpoint(data, folder.checkpoint_file)[0], sha256)


def load_teacher(config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup) -> Method | None:
    """Load the run whose folder the option `teacher` of `config` names; None for another teacher, or none.

    Raises UsageError for a run that has seen other images of the data set, UserError for one that is not finished.
    """
    if method_class(config.method).required_option != "teacher":
        return None
    folder = Path(config.options["teacher"]).expanduser()
    if not (folder / "config.json").is_file():
        return None
    teacher, results = locate_run(folder)
    check_same_images(teacher, config)
    # Without the URL, which belongs to the results of the run and not to those of the teacher.
    return load_trained(teacher, replace(runtime, results=results, results_url=None), group).method
