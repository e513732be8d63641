"""Reduce a finished run to a `LedgerEntry`, docs/results/ledger/METHOD-DATASET-BACKBONE-seedN-HASH.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from procap.errors import UserError
from runner.config import Amount, Count, FrozenModel, Precision, TargetName, Throughput
from runner.results import WRITTEN, StoredDocument, write_json
from runner.session import Run
from shards.manifest import Sha256
from shards.uneven_samples import BALANCED, Sampling

Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class LedgerCount(FrozenModel):
    """The correct images of a target, under the default settings of the evaluation."""

    target: TargetName
    correct: Count
    total: Count = Field(gt=0, description="all images of the target")
    manifest_digest: Digest
    images_per_second: Throughput | None = Field(description="with decoding")

    @model_validator(mode="after")
    def _adds_up(self) -> LedgerCount:
        if self.correct > self.total:
            raise ValueError(f"{self.correct} of {self.total} images are correct")
        return self


class LedgerEntry(StoredDocument):
    """A run, as one file of the ledger."""

    program: str = Field(description="version of this program, and its commit if known")
    written: str = Field(pattern=WRITTEN, description="end of the training, in UTC")
    config_hash: str = Field(pattern="^[0-9a-f]{8}$")
    method: str
    dataset: str
    classes: str
    shots: Count = Field(description="training images per class; 0: all of them")
    sampling: Sampling = BALANCED
    init_digest: str = Field(default="", pattern="^([0-9a-f]{64})?$", description="of the run that it started from")
    seed: Count
    backbone: str
    precision: Precision
    recipe: str
    recipe_fields: dict[str, Any]
    options: dict[str, Any]
    manifest_digest: Digest
    backbone_digest: Digest
    checkpoint_sha256: Sha256
    imported: bool = Field(description="from a public checkpoint, instead of a training")
    train_seconds: Amount
    parameters: Count
    device: str = Field(description="the GPU, else the CPU with its cores")
    torch: str
    counts: list[LedgerCount] = Field(min_length=1)

    @property
    def file(self) -> str:
        return f"{self.method}-{self.dataset}-{self.backbone}-seed{self.seed}-{self.config_hash}.json"


def write_entry(run: Run, folder: Path) -> Path:
    """Write the entry of a finished run to `folder`. Raises UserError if it is not finished or has no whole result."""
    config, training = run.config, run.read_training()
    if training is None:
        raise UserError(f"{run.path} is not finished")
    results = run.folder.read_evaluations()
    # Without a limit: current results are of all images.
    whole = [result for result in results if result.is_current(training, None) and not result.settings.name]
    if not whole:
        raise UserError(f"{run.path} has no result of all images: evaluate it first")
    machine = training.environment
    fields = ("target", "correct", "total", "manifest_digest", "images_per_second")
    of_config = ("method", "dataset", "classes", "shots", "sampling", "seed", "precision", "init_digest")
    same = ("program", "written", "config_hash", "manifest_digest", "backbone_digest", "checkpoint_sha256")
    entry = LedgerEntry(
        **{name: getattr(training, name) for name in same},
        **{name: getattr(config, name) for name in of_config},
        backbone=config.backbone_name,
        recipe=config.recipe_name,
        recipe_fields=config.recipe.model_dump(mode="json"),
        options=config.portable().options,
        imported=training.imported is not None,
        train_seconds=training.seconds,
        parameters=training.trainable_parameters,
        device=machine.get("gpu") or f"{machine['cpu']['name']}, {machine['cpu']['cores']} cores",
        torch=machine["packages"]["torch"],
        counts=[LedgerCount(**{name: getattr(result, name) for name in fields}) for result in whole],
    )
    write_json(folder / entry.file, entry)
    return folder / entry.file
