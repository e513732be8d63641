"""Load the finished run that teaches a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from procap.methods import method_class
from procap.methods.method import Method
from runner.config import RunConfig, RuntimeConfig
from runner.distributed.collectives import ProcessGroup
from runner.evaluate import load_trained
from runner.initial_run import check_same_images
from runner.run_folders import locate_run


def load_teacher(config: RunConfig, runtime: RuntimeConfig, group: ProcessGroup) -> Method | None:
    """Load the run whose folder the option `teacher` of `config` names; None for another teacher, or none.

    Raises UsageError for a run that has seen other images of the data set, UserError for one that is not finished.
    """
    if method_class(config.method).required_option != "teacher":
        return None
    folder = Path(config.options["teacher"]).expanduser()
    if not (folder / "config.json").is_file():
        return None
    source, results = locate_run(folder)
    check_same_images(source, config)
    # Without the URL, which belongs to the results of the run and not to those of the teacher.
    return load_trained(source, replace(runtime, results=results, results_url=None), group).method
