"""Share finished runs through the Hugging Face Hub: a repository of type "model" for each run.

run.json            a `SharedRun`: method, options, recipe, backbone and its digest, classes, few-shot samples, versions
model.safetensors   the learned tensors under the names of the method's parameters: the run's `checkpoint.safetensors`
README.md           the model card, with measured accuracies as the Hub's model-index

A downloaded run becomes a run folder in the results, without the evaluations of its publisher.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from os import PathLike, fspath
from pathlib import Path

from procap.errors import UsageError, UserError
from procap.hub import hub_file
from procap.methods import data_use, describe_method, title_and_colour
from runner.config import FrozenModel, RunConfig, RuntimeConfig, Target
from runner.results import EvalResult, TrainResult, read_document, write_bytes, write_json
from runner.session import Run, Session, TrainedRun
from shards.files import read_regular
from shards.remote import translate_errors

HUB = "hf://"
RUN_FILE, WEIGHTS_FILE, CARD_FILE = "run.json", "model.safetensors", "README.md"


class SharedRun(FrozenModel):
    """`run.json` of a repository: how the tensors were trained, and what they need."""

    procap_version: str
    config: RunConfig
    training: TrainResult
    classnames: tuple[str, ...]


def shared_files(run: Run, repository: str) -> dict[str, bytes]:
    """Make the files of a finished run for the Hub, by their names. Raises UserError if it is not finished."""
    from runner.checkpoint import decode_checkpoint, read_checkpoint_bytes

    config, folder = run.config, run.folder
    run.session.remote.pull(run.path, weights=True)
    training = folder.read_training()
    if training is None:
        raise UserError(f"{run.path} is not finished")
    weights = read_checkpoint_bytes(folder.checkpoint_file, training.checkpoint_sha256)
    _, card = decode_checkpoint(weights, folder.checkpoint_file)
    shared = SharedRun(
        procap_version=training.program, config=config.portable(), training=training, classnames=card.classnames
    )
    text = json.dumps(shared.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False, allow_nan=False)
    # Whole results alone: the Hub shows them next to those of other models.
    results = [result for result in folder.read_evaluations() if result.is_current(training, None)]
    readme = model_card(shared, results, repository)
    return {RUN_FILE: f"{text}\n".encode(), WEIGHTS_FILE: weights, CARD_FILE: readme.encode()}


def model_card(shared: SharedRun, results: list[EvalResult], repository: str) -> str:
    """Write the model card: metadata with the accuracies, which the Hub shows as a table, and how the run is used."""
    from huggingface_hub import EvalResult as CardResult
    from huggingface_hub import ModelCardData

    config = shared.config
    title = f"{title_and_colour(config.method)[0]} on {config.dataset}"
    measured = []
    for result in results:
        target = Target.parse_unchecked(result.target)
        measured.append(
            CardResult(
                task_type="image-classification",
                dataset_type=target.dataset,
                dataset_name=str(target),
                dataset_config=target.classes,
                dataset_split=target.split,
                metric_type="accuracy",
                metric_value=round(result.accuracy, 2),
                metric_args={"correct": result.correct, "total": result.total, **result.settings.changes},
            )
        )
    data = ModelCardData(
        library_name="procap-bench",
        pipeline_tag="image-classification",
        tags=["clip", "few-shot", config.method],
        model_name=title,
        eval_results=measured or None,
    )
    shots = f"{config.shots} images per class ({config.sampling})" if config.shots else "all images"
    seen = f"{shots} of {'the ' * (config.classes != 'all')}{config.classes} classes of {config.dataset}"
    if pool := shared.training.unlabelled:
        seen = f"{pool.images} images of {config.dataset} without labels ({pool.pool})"
    trained = f"Learned from {seen}, seed {config.seed}," if config.recipe.epochs else "Used"
    summary, looked_at = describe_method(config.method)["summary"], str(data_use(config.method, config.options))
    lines = [
        f"---\n{data.to_yaml()}\n---\n# {title}\n",
        f"{summary}. {trained} on the frozen CLIP {config.backbone_name} "
        f"(digest of its weights: {shared.training.backbone_digest}), by procap-bench {shared.procap_version}.\n",
        f"Beside the frozen CLIP it has looked at: {looked_at or 'nothing'}.\n",
        f"```sh\nprocap eval {HUB}{repository}\n```\n",
        f"`{WEIGHTS_FILE}` has the learned tensors, `{RUN_FILE}` everything that trained them.",
    ]
    return "\n".join(lines) + "\n"


def push_files(files: dict[str, bytes], repository: str, *, private: bool = False) -> str:
    """Upload the files in one commit, with the token of `hf auth login` or $HF_TOKEN; returns the commit's URL."""
    from huggingface_hub import CommitOperationAdd, HfApi

    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    with translate_errors(f"{HUB}{repository}"):
        api = HfApi()
        # None leaves the choice to the settings of an organisation, which may make new repositories private.
        api.create_repo(repository, private=private or None, exist_ok=True)
        return str(api.create_commit(repository, additions, commit_message="Upload a run").commit_url)


def fetch_run(location: str, session: Session) -> Run:
    """Download the run at `hf://NAMESPACE/NAME[@REVISION]` into the session's results, where an equal one is kept.

    Raises UserError for files that do not belong together, and if the results hold another training of the run.
    """
    from huggingface_hub import constants

    from procap.weights.files import SIZE_LIMIT

    repository, _, revision = location.removeprefix(HUB).partition("@")
    if repository.count("/") != 1:
        raise UsageError(f"{location} is not {HUB}NAMESPACE/NAME")
    fetch = partial(hub_file, repository, revision=revision or None, offline=constants.HF_HUB_OFFLINE)
    shared = read_document(fetch(RUN_FILE), SharedRun, f"{location} is not a run of this program")
    weights = read_regular(fetch(WEIGHTS_FILE), SIZE_LIMIT)
    assert shared is not None
    training = shared.training
    hashes = shared.config.hash, hashlib.sha256(weights).hexdigest()
    if hashes != (training.config_hash, training.checkpoint_sha256):
        raise UserError(f"{location}: configuration, result and {WEIGHTS_FILE} do not belong together")
    run = session.get_run(shared.config)
    folder = run.folder
    with run.work():
        existing = folder.read_training()
        if existing and existing.checkpoint_sha256 == training.checkpoint_sha256:
            return run
        if existing or folder.config_file.exists():
            raise UserError(f"{folder.path} has a different training than {location}: name another --results")
        # `train.json` comes last here too: a kill before leaves an unfinished run.
        write_bytes(folder.checkpoint_file, weights)
        write_json(folder.config_file, shared.config)
        write_json(folder.train_file, training)
    return run


def load_run(source: str | PathLike[str], runtime: RuntimeConfig | None = None) -> TrainedRun:
    """Load a finished run from its folder, or `hf://NAMESPACE/NAME`; raises UserError as `load_trained`."""
    from runner.trained_runs import load_trained

    session, name = Session(runtime), fspath(source)
    return load_trained(fetch_run(name, session) if name.startswith(HUB) else session.locate(Path(name)))
