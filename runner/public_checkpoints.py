"""Import checkpoints of public trainers as finished runs, and export finished runs for public code."""

from __future__ import annotations

import warnings
from pathlib import Path

from procap.errors import UserError
from procap.methods.method import Method
from procap.methods.public import PublicFile, layout_of, load_public_state, pack_public, public_state, read_public
from runner.acceleration import Acceleration
from runner.checkpoint import check_finite, save_checkpoint
from runner.config import RunConfig, RuntimeConfig
from runner.environment import environment, provenance, resolve_device
from runner.evaluate import load_trained
from runner.meters import peak_memory, start_memory_peak
from runner.remote_results import RemoteResults, synchronized_run
from runner.results import CheckpointCard, ImportedFile, TrainResult, write_bytes, write_json
from runner.run_folders import RunFolder
from runner.setup import build
from runner.tracking.exporter import exporter_for
from runner.workbench import Workbench
from shards.files import file_sha256
from shards.image_selection import select_class_labels
from shards.reader import open_dataset


def import_run(config: RunConfig, runtime: RuntimeConfig, file: Path, *, force: bool = False) -> TrainResult:
    """Write the tensors in `file`, a checkpoint of the method's public code, as the finished run `config`.

    A run that was imported from the same file is returned as it is. `force` deletes what is in the run's folder.
    Raises UserError if the file is damaged or does not fit `config`, or if there is another run already.
    """
    content, method, card = load_public_run(config, runtime, file)
    folder, remote = RunFolder(runtime.results / config.path), RemoteResults.from_runtime(runtime)
    with folder.locked(), synchronized_run(remote, config.path, resumes=not force):
        if force:
            # The URL first: a run that was deleted here alone would come back with the next download.
            remote.delete_run(config.path)
            folder.clear()
        elif existing := find_imported(config, runtime, file):
            return existing
        device = method.clip.device
        start_memory_peak(device)
        if content.epoch is not None and content.epoch != config.recipe.epochs:
            warnings.warn(
                f"{file} was trained for {content.epoch} epochs and the recipe of {config.path} has "
                f"{config.recipe.epochs}: name its --epochs, --task, --shots and --seeds, where they are not these",
                stacklevel=2,
            )
        result = TrainResult(
            config_hash=config.hash,
            peak_memory_bytes=peak_memory(device),
            trainable_parameters=sum(parameter.numel() for parameter in method.parameters()),
            manifest_digest=card.manifest_digest,
            checkpoint_sha256=save_checkpoint(folder.checkpoint_file, method, card),
            backbone_digest=card.backbone_digest,
            **provenance(environment(device)),
            imported=ImportedFile(name=file.name, sha256=file_sha256(file), epoch=content.epoch),
        )
        write_json(folder.config_file, config)
        write_json(folder.train_file, result)
    exporter_for(runtime).post(config.path)
    return result


def find_imported(config: RunConfig, runtime: RuntimeConfig, file: Path) -> TrainResult | None:
    """Find the run that was imported from `file`. Raises UserError if there is another run."""
    sha256, folder = file_sha256(file), RunFolder(runtime.results / config.path)
    if (existing := folder.read_training()) and existing.imported and existing.imported.sha256 == sha256:
        return existing
    if folder.config_file.exists():
        raise UserError(f"{folder.path} is a run already: name another --results, or replace it with --force")
    return None


def load_public_run(config: RunConfig, runtime: RuntimeConfig, file: Path) -> tuple[PublicFile, Method, CheckpointCard]:
    """Load a file into the method of a run. Raises UserError if it is damaged or does not fit `config`."""
    content, device = read_public(file), resolve_device(runtime.device)
    shards = open_dataset(runtime.data, config.dataset)
    clip = Workbench().load_backbone(config, device, Acceleration.parse("off", device))
    method, card = build(config, shards, clip, select_class_labels(shards, config.classes))
    try:
        load_public_state(method, content.tensors)
        check_finite(method.state_dict(), "in the file, whose training has diverged: import another one")
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return content, method, card


def export_run(config: RunConfig, runtime: RuntimeConfig, out: Path, format: str = "dassl") -> Path:
    """Write the finished run `config` below `out` as public code loads it; returns the file.

    format: dassl or safetensors. Raises UserError if the run is not finished, or its method has no public code or none
    that uses the format.
    """
    trained = load_trained(config, runtime)
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
