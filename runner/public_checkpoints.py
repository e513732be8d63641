"""Import checkpoints of public trainers as finished runs, and export finished runs for public code."""

from __future__ import annotations

import warnings
from pathlib import Path

from procap.errors import UserError
from procap.methods.method import Method
from procap.methods.public import PublicFile, layout_of, load_public_state, pack_public, public_state, read_public
from runner.acceleration import Acceleration
from runner.checkpoint import check_finite, save_checkpoint
from runner.provenance import describe_environment, provenance
from runner.results import CheckpointCard, ImportedFile, TrainResult, write_bytes, write_json
from runner.session import Run
from runner.setup import build_method_and_card
from runner.trained_runs import load_trained
from shards.files import file_sha256
from shards.image_selection import select_class_labels


def import_run(run: Run, file: Path, *, force: bool = False) -> TrainResult:
    """Write the tensors in `file`, a checkpoint of the method's public code, as a finished run.

    A run that was imported from the same file is returned as it is. `force` deletes what is in the run's folder.
    Raises UserError if the file is damaged or does not fit the run, or if there is another run already.
    """
    config, folder = run.config, run.folder
    content, method, card = load_public_run(run, file)
    sha256 = file_sha256(file)
    with run.work(resumes=not force):
        if force:
            run.session.delete_run(run.path)
        elif (existing := folder.read_training()) and existing.imported and existing.imported.sha256 == sha256:
            return existing
        elif folder.config_file.exists():
            raise UserError(f"{folder.path} is a run already: name another --results, or replace it with --force")
        if content.epoch is not None and content.epoch != config.recipe.epochs:
            warnings.warn(
                f"{file} was trained for {content.epoch} epochs and the recipe of {config.path} has "
                f"{config.recipe.epochs}: name its --epochs, --task, --shots and --seeds, where they are not these",
                stacklevel=2,
            )
        result = TrainResult(
            config_hash=config.hash,
            trainable_parameters=sum(parameter.numel() for parameter in method.parameters()),
            manifest_digest=card.manifest_digest,
            checkpoint_sha256=save_checkpoint(folder.checkpoint_file, method, card),
            backbone_digest=card.backbone_digest,
            **provenance(describe_environment(method.clip.device)),
            imported=ImportedFile(name=file.name, sha256=sha256, epoch=content.epoch),
        )
        write_json(folder.config_file, config)
        write_json(folder.train_file, result)
    return result


def load_public_run(run: Run, file: Path) -> tuple[PublicFile, Method, CheckpointCard]:
    """Load a file into the method of a run. Raises UserError if it is damaged or does not fit."""
    config, session, content = run.config, run.session, read_public(file)
    dataset = session.dataset(config.dataset)
    clip = session.backbones.load(config, session.device, Acceleration())
    method, card = build_method_and_card(config, dataset, clip, select_class_labels(dataset, config.classes))
    try:
        load_public_state(method, content.tensors)
        check_finite(method.state_dict(), "in the file, whose training has diverged: import another one")
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return content, method, card


def export_run(run: Run, out: Path, format: str = "dassl") -> Path:
    """Write a finished run below `out` as public code loads it; returns the file.

    format: dassl or safetensors. Raises UserError for a run or a format that public code of its method does not have.
    """
    config, trained = run.config, load_trained(run)
    layout = layout_of(trained.method)
    if format == "dassl" and not layout.dassl:
        raise UserError(f"the public code of {config.method} does not read files of Dassl: use --format safetensors")
    imported = trained.training.imported
    epoch = imported.epoch if imported and imported.epoch is not None else config.recipe.epochs
    # Dassl's --load-epoch finds a file by this number.
    name = f"model.pth.tar-{epoch}" if format == "dassl" else "model.safetensors"
    file = out / config.path / layout.folder / name
    write_bytes(file, pack_public(PublicFile(public_state(trained.method), epoch), format))
    return file
