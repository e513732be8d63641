"""Read the finished runs that a training starts from, and refuse those that have seen other images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from procap.errors import UsageError, UserError
from procap.methods import data_use, method_class
from procap.methods.features import FeatureMethod
from runner.checkpoint import InitialRun, decode_checkpoint, read_checkpoint_bytes
from runner.config import RunConfig
from runner.run_folders import RunFolder
from runner.session import Run
from shards.uneven_samples import BALANCED


def start_from(config: RunConfig, earlier: Run, results: Path) -> RunConfig:
    """Return `config` with the finished run `earlier` as its start. Raises UsageError if that saw other images."""
    if not config.recipe.epochs or issubclass(method_class(config.method), FeatureMethod):
        raise UsageError(f"--init: {config.method} has no training on images that could start from a run")
    training = earlier.folder.read_training()
    if training is None:
        raise UsageError(f"--init: {earlier.path} is not finished")
    check_same_images(earlier.config, config)
    # Relative where possible, so that the results can be moved together.
    is_here = earlier.session.runtime.results.resolve() == results.resolve()
    folder = earlier.path if is_here else earlier.folder.path.resolve().as_posix()
    return config.model_copy(update={"init": folder, "init_digest": training.checkpoint_sha256})


def check_same_images(earlier: RunConfig, config: RunConfig) -> None:
    """Raise UsageError if `earlier` has seen images of the data set of `config` that a training of it does not."""
    if earlier.chosen_on_test:
        # Tables mark such a run, but not another one that learns from it.
        raise UsageError(f"{earlier.path} was chosen by test accuracy: train with --option selection=validation")
    images = ("classes", "shots", "sampling", "seed")
    if earlier.dataset == config.dataset and any(getattr(earlier, name) != getattr(config, name) for name in images):
        raise UsageError(f"{earlier.path} has seen other images: train with its {', '.join(images)}")
    seen, said = (data_use(run.method, run.options) for run in (earlier, config))
    has_wider_pool = seen.unlabelled in ("base", "train") and said.unlabelled not in (seen.unlabelled, "train")
    if earlier.dataset == config.dataset and (has_wider_pool or (seen.names == "all" and said.names != "all")):
        raise UsageError(f"{earlier.path} has looked at {seen}, of which tables would say only: {said}")


def preliminary_run(config: RunConfig) -> RunConfig | None:
    """Return the configuration of the run that is trained before `config`: its method's `first_stage`.

    None if the method has none, or if the configuration names a run to start from.
    """
    cls = method_class(config.method)
    if config.init or not cls.first_stage or not config.recipe.epochs:
        return None
    first = method_class(cls.first_stage)
    changes: dict[str, Any] = {
        "method": cls.first_stage,
        "options": {option: config.options[option] for option in first.Options.model_fields},
        "recipe": cls.first_recipe(config.recipe, cls.Options(**config.options), config.dataset),
    }
    if first.learns_unlabelled and config.options["unlabelled"] != "few-shot":
        # It reads no few-shot image: one run serves all shots and seeds.
        changes |= {"shots": 0, "sampling": BALANCED, "seed": 1}
    return config.model_copy(update=changes)


def read_initial_run(run: Run) -> InitialRun | None:
    """Read the run that a training starts from, None without one; all ranks call this.

    Raises UserError if its checkpoint is not the one that the training was planned with.
    """
    config, session = run.config, run.session
    first = preliminary_run(config)
    path = first.path if first else config.init
    if not path:
        return None
    folder = RunFolder(session.runtime.results / path)

    def read() -> tuple[bytes, str]:
        # An absolute path is in different results, which this URL does not hold.
        if not Path(path).is_absolute():
            session.remote.pull(path, weights=True)
        training = folder.read_training()
        if training is None:
            raise UserError(f"{folder.path}, from which {config.path} starts, is not finished")
        sha256 = config.init_digest or training.checkpoint_sha256
        return read_checkpoint_bytes(folder.checkpoint_file, sha256), sha256

    data, sha256 = session.group.call_on_first(read)
    is_stage = RunConfig.parse_path(path)["method"] == method_class(config.method).first_stage
    return InitialRun(folder.path, decode_checkpoint(data, folder.checkpoint_file)[0], sha256, is_stage)
