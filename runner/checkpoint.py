"""Write and read checkpoints of learned tensors (safetensors) and the states that a run resumes from."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from procap.clip import describe_differences
from procap.errors import UserError, describe_invalid
from procap.methods.method import Method
from procap.weights.files import SIZE_LIMIT
from runner.config import Amount, Count
from runner.meters import MeterState
from runner.results import CheckpointCard, EpochLog, write_bytes
from shards.files import read_regular

logger = logging.getLogger(__name__)

# The newest, and one to go back to if that is damaged.
KEPT_STATES = 2
STATE_NAME = re.compile(r"step-\d{8}-epoch-\d{4,}-[0-9a-f]{16}\.pt")
"""Names of saved states: steps and epochs that are done, and the beginning of the file's SHA-256."""


def save_checkpoint(path: Path, method: Method, card: CheckpointCard) -> str:
    """Write the learned tensors and `card`; returns the file's SHA-256. Equal trainings write equal bytes."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in method.state_dict().items()}
    # Local folders in it would change the bytes of equal trainings.
    card = card.model_copy(update={"config": card.config.portable()})
    # One metadata entry only: safetensors writes several in an order that differs from process to process.
    metadata = {"procap": json.dumps(card.model_dump(mode="json"), sort_keys=True, allow_nan=False)}
    return write_bytes(path, dump_tensors(tensors, metadata))


def read_checkpoint(path: Path, sha256: str | None = None) -> tuple[dict[str, Tensor], CheckpointCard]:
    """Read tensors and card of a checkpoint. Raises UserError for a missing, altered, broken or foreign file."""
    return decode_checkpoint(read_checkpoint_bytes(path, sha256), path)


def read_checkpoint_bytes(path: Path, sha256: str | None) -> bytes:
    """Read the bytes of a checkpoint. Raises UserError if it is missing or was altered."""
    try:
        data = read_regular(path, SIZE_LIMIT)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot read the checkpoint {path}: {reason}; train again with --force") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is not the file that training wrote (its SHA-256 differs); train again with --force")
    return data


def decode_checkpoint(data: bytes, path: Path) -> tuple[dict[str, Tensor], CheckpointCard]:
    """Decode tensors and card of a checkpoint's bytes. Raises UserError naming `path` if they are no checkpoint."""
    try:
        # A safetensors file begins with the length of a JSON header; `load_tensors` does not return the metadata in it.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        card = CheckpointCard.model_validate_json(header["__metadata__"]["procap"], strict=True)
        return load_tensors(data), card
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = describe_invalid(error) if isinstance(error, ValidationError) else str(error).partition("\n")[0]
        raise UserError(f"{path} is not a checkpoint of this program ({reason}); train again with --force") from error


def load_into(method: Method, tensors: Mapping[str, Tensor], file: Path) -> None:
    """Load every learned tensor of `method`. Raises UserError naming tensors that are missing or do not fit."""
    # First, because the rows of some tensors depend on the training, such as on its number of images.
    method.adapt_shapes(tensors)
    if problems := describe_differences(method.state_dict(), tensors):
        raise UserError(f"{file} does not fit this method and backbone: {'; '.join(problems[:3])}")
    method.load_state_dict(dict(tensors))


@dataclass(frozen=True)
class InitialRun:
    """The learned tensors of a finished run, and the folder and SHA-256 of its checkpoint.

    is_stage: it is a run of the first stage, which has some of the tensors.
    """

    folder: Path
    tensors: Mapping[str, Tensor]
    sha256: str
    is_stage: bool = False

    def load_into(self, method: Method) -> None:
        """Set the parameters of `method`, which keeps its buffers. Raises UserError for tensors that do not fit.

        After a first stage it keeps what that does not have.
        """
        if self.is_stage:
            load_into(method, {**method.state_dict(), **self.tensors}, self.folder)
            return
        parameters = dict(method.named_parameters())
        buffers = {name: value for name, value in method.state_dict().items() if name not in parameters}
        load_into(method, {**self.tensors, **buffers}, self.folder)


@dataclass
class TrainState:
    """Everything that determines how a training continues, except parameters and optimizer."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    epoch: Count = 0
    step: Count = 0
    step_in_epoch: Count = 0
    images: Count = 0
    epoch_images: Count = 0
    # Seconds in steps when the epoch began, not a time of day.
    epoch_began: Amount = 0.0
    term_sums: dict[str, float] = field(default_factory=dict)
    epochs: list[EpochLog] = field(default_factory=list)
    meter: MeterState = field(default_factory=MeterState)
    resumed: Count = 0
    stage: Count = 0
    epoch_skipped: Count = 0

    def count(self, images: int, terms: Mapping[str, float], skipped: bool = False) -> None:
        """Add one step. skipped: whether its gradients overflowed, so that nothing was updated."""
        self.epoch_skipped += skipped
        self.step += 1
        self.step_in_epoch += 1
        self.images += images
        self.epoch_images += images
        for name, value in terms.items():
            self.term_sums[name] = self.term_sums.get(name, 0.0) + value

    def close_epoch(self, lr: float, clock: float, gradient_norms: Mapping[str, float]) -> None:
        """Turn the sums into the epoch's log entry and begin the next; `clock` is the seconds in steps so far."""
        seconds = clock - self.epoch_began
        means = {name: value / self.step_in_epoch for name, value in self.term_sums.items()}
        images_per_second = self.epoch_images / seconds if seconds > 0 else None
        self.epochs.append(
            EpochLog(
                epoch=self.epoch,
                lr=lr,
                terms=means,
                seconds=seconds,
                images_per_second=images_per_second,
                skipped=self.epoch_skipped,
                gradient_norms=dict(gradient_norms),
            )
        )
        self.epoch, self.step_in_epoch, self.epoch_images, self.epoch_skipped = self.epoch + 1, 0, 0, 0
        self.term_sums, self.epoch_began = {}, clock


TRAIN_STATE = TypeAdapter(TrainState)


class StateFiles:
    """The last two saved states of a run: files of `torch.save`, which are loaded without unpickling code.

    identity: must be the same when the run resumes (config hash, digests, engine).
    """

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        self.identity = dict(identity)

    def save(self, state: TrainState, parts: Mapping[str, Any]) -> Path:
        """Write `state`, and the state dicts of method, optimizer and so on."""
        buffer, progress = io.BytesIO(), TRAIN_STATE.dump_json(state, by_alias=True).decode()
        torch.save({"identity": self.identity, "progress": progress, **parts}, buffer)
        data = buffer.getvalue()
        digest = hashlib.sha256(data).hexdigest()[:16]
        path = self.folder / f"step-{state.step:08d}-epoch-{state.epoch:04d}-{digest}.pt"
        write_bytes(path, data)
        # Only now that the new state is on the disk.
        for old in [other for other in self._newest_first() if other != path][KEPT_STATES - 1 :]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> bytes | None:
        """Return the newest intact state, for `unpack`. Raises UserError for the state of a different training."""
        for path in self._newest_first():
            try:
                data = path.read_bytes()
                # A copy or a broken disk can change tensors, which `torch.load` reads without an error.
                if hashlib.sha256(data).hexdigest()[:16] != path.stem[-16:]:
                    raise ValueError("its hash is not the one in its name")
            except (OSError, ValueError) as error:
                logger.warning("%s cannot be used (%s); going back to the state before it", path, error)
                continue
            identity = _load(data)["identity"]
            for name, value in self.identity.items():
                # An error and no step back: to go on from an older state would hide that data or weights have changed.
                if identity.get(name) != value:
                    reason = f"its {name.replace('_', ' ')} is {identity.get(name)}, here it is {value}"
                    raise UserError(f"cannot resume from {path}: {reason}; start over with --force")
            return data
        return None

    @staticmethod
    def unpack(data: bytes) -> tuple[TrainState, dict[str, Any]]:
        """Decode the arguments of `save`; tensors are on the CPU."""
        content = _load(data)
        return TRAIN_STATE.validate_json(content["progress"], strict=True), content

    def _newest_first(self) -> list[Path]:
        # Numbers of a fixed length sort as texts. The last step of an epoch can be saved twice, before and after the
        # epoch is closed.
        return sorted((path for path in self.folder.glob("step-*") if STATE_NAME.fullmatch(path.name)), reverse=True)


def _load(data: bytes) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return content


def check_finite(tensors: Mapping[str, Tensor], when: str) -> None:
    """Raise UserError naming the first tensor that holds a NaN or an infinity."""
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise UserError(f"{name} is not finite {when}")
