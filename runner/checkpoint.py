"""Write and read checkpoints of learned tensors and the states that a run resumes from: safetensors, no pickles."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn

from procap.clip import describe_differences
from procap.errors import UserError, describe_invalid
from procap.recipe import Recipe
from runner.config import Amount, Count, FrozenModel
from runner.meters import MeterState
from runner.results import SCHEMA, CheckpointCard, EpochLog, describe_no_checkpoint, read_description, write_bytes
from shards.files import read_file

logger = logging.getLogger(__name__)

KEPT_STATES = 2
STATE_NAME = re.compile(r"step-(\d{8})-[0-9a-f]{16}\.safetensors")
"""Names of saved states: the step, and the beginning of the file's SHA-256."""
SCALER_STATE = {"scaler/scale": "scale", "scaler/growth_tracker": "_growth_tracker"}
"""Names of a gradient scaler's state in a saved state, and in the scaler's own state dict."""
SCALER_LIKE = {"scaler/scale": torch.tensor(1.0), "scaler/growth_tracker": torch.tensor(0)}


def save_checkpoint(path: Path, method: nn.Module, card: CheckpointCard) -> str:
    """Write the learned tensors and `card`; returns the file's SHA-256. Equal trainings write equal bytes."""
    return write_bytes(path, pack_tensors(_learned_tensors(method), card.model_dump(mode="json")))


def read_checkpoint(path: Path, sha256: str | None = None) -> tuple[dict[str, Tensor], CheckpointCard]:
    """Read tensors and card of a checkpoint. Raises UserError for a missing, altered, broken or foreign file."""
    return decode_checkpoint(read_checkpoint_bytes(path, sha256), path)


def read_checkpoint_bytes(path: Path, sha256: str | None) -> bytes:
    """Read the bytes of a checkpoint. Raises UserError if it is missing or was altered."""
    try:
        data = read_file(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot read the checkpoint {path}: {reason}; train again with --force") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is not the file that training wrote (its SHA-256 differs); train again with --force")
    return data


def decode_checkpoint(data: bytes, path: Path) -> tuple[dict[str, Tensor], CheckpointCard]:
    """Decode tensors and card of a checkpoint's bytes. Raises UserError naming `path` if they are no checkpoint."""
    try:
        tensors, text = unpack_tensors(data)
        card = CheckpointCard.model_validate_json(text, strict=True)
    except (SafetensorError, ValueError) as error:
        raise describe_no_checkpoint(path, error) from error
    if name := find_not_finite(tensors):
        raise UserError(f"{path}: {name} has a value that is not finite; train again with --force")
    return tensors, card


def load_into(method: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Load every learned tensor of `method`. Raises UserError naming one that is missing or of other shape or type."""
    if problem := find_misfit(method.state_dict(), tensors):
        raise UserError(f"{source} does not fit this method and backbone: {problem}")
    method.load_state_dict(dict(tensors))


def find_misfit(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Describe how names, shapes or types of `found` differ from those of `wanted`; "" if they do not."""
    types = ((name, found[name].dtype, like.dtype) for name, like in wanted.items() if name in found)
    wrong = [f"{name} is {own}, expected {like}" for name, own, like in types if own != like]
    return "; ".join(describe_differences(wanted, found) or wrong[:1])


@dataclass
class TrainState:
    """Everything that determines how a training continues, except parameters and optimizer."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    epoch: Count = 0
    step: Count = 0
    step_in_epoch: Count = 0
    images: Count = 0
    epoch_images: Count = 0
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

    def close_epoch(self, lr: float, clock: float) -> None:
        """Turn the sums into the epoch's log entry and begin the next; `clock` is the seconds in steps so far."""
        seconds = clock - self.epoch_began
        means = {name: value / self.step_in_epoch for name, value in self.term_sums.items()}
        rate = self.epoch_images / seconds if seconds > 0 else None
        self.epochs.append(
            EpochLog(
                epoch=self.epoch,
                lr=lr,
                terms=means,
                seconds=seconds,
                images_per_second=rate,
                skipped=self.epoch_skipped,
            )
        )
        self.epoch, self.step_in_epoch, self.epoch_images, self.epoch_skipped = self.epoch + 1, 0, 0, 0
        self.term_sums, self.epoch_began = {}, clock


class SavedState(FrozenModel):
    """Metadata of a saved state; `identity` must be equal when the run resumes (config hash, digests)."""

    state_schema: Literal[1] = SCHEMA
    identity: dict[str, str]
    state: TrainState


class StateFiles:
    """The last two saved states of a run."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        self.folder = folder
        self.identity = dict(identity)

    def save(self, state: TrainState, tensors: Mapping[str, Tensor]) -> Path:
        """Write `state` and the tensors of an engine. Raises UserError if a tensor is not finite."""
        check_finite(tensors, f"after step {state.step}")
        saved = SavedState(identity=self.identity, state=state)
        data = pack_tensors(dict(tensors), saved.model_dump(mode="json"))
        path = self.folder / f"step-{state.step:08d}-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
        write_bytes(path, data)
        for old in [other for other in self._newest_first() if other != path][KEPT_STATES - 1 :]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> tuple[bytes, Path] | None:
        """Find the newest intact state, as bytes for `unpack`, and its file.

        Raises UserError for one of another identity or version, or with a value that is not finite.
        """
        for path in self._newest_first():
            try:
                data = read_file(path)
                if hashlib.sha256(data).hexdigest()[:16] != path.stem[-16:]:
                    raise ValueError("its hash is not the one in its name")
                tensors, text = unpack_tensors(data)
            except (OSError, SafetensorError, ValueError) as error:
                logger.warning("%s cannot be used (%s); going back to the state before it", path, error)
                continue
            try:
                identity = SavedState.model_validate_json(text, strict=True).identity
            except ValidationError as error:
                raise cannot_resume(path, describe_invalid(error)) from error
            for name, value in self.identity.items():
                if (found := identity.get(name)) != value:
                    raise cannot_resume(path, f"its {name.replace('_', ' ')} is {found}, here it is {value}")
            if wrong := find_not_finite(tensors):
                raise cannot_resume(path, f"{wrong} has a value that is not finite")
            return data, path
        return None

    @staticmethod
    def unpack(data: bytes) -> tuple[TrainState, dict[str, Tensor]]:
        """Decode the arguments of `save`."""
        tensors, text = unpack_tensors(data)
        return SavedState.model_validate_json(text, strict=True).state, tensors

    def _newest_first(self) -> list[Path]:
        found = [path for path in self.folder.glob("step-*") if STATE_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: (path.name[:13], path.stat().st_mtime_ns), reverse=True)


def cannot_resume(path: Path, reason: str) -> UserError:
    """Explain in one line why the saved state at `path` cannot be used."""
    return UserError(f"cannot resume from {path}: {reason}; start over with --force")


def find_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds a NaN or an infinity."""
    return next((name for name, value in tensors.items() if not torch.isfinite(value).all()), None)


def check_finite(tensors: Mapping[str, Tensor], when: str) -> None:
    """Raise UserError naming the first tensor that holds a NaN or an infinity."""
    if name := find_not_finite(tensors):
        raise UserError(f"{name} is not finite {when}: try a lower lr or --precision fp32")


def training_tensors(method: nn.Module, slots: Mapping[str, Tensor], scaler: torch.amp.GradScaler) -> dict[str, Tensor]:
    """Collect the learned tensors, the optimizer's slots and, of an fp16 run, the scaler's state, on the CPU."""
    tensors = {f"param/{name}": value for name, value in _learned_tensors(method).items()}
    tensors |= {f"optim/{name}": slot.detach().cpu().contiguous() for name, slot in slots.items()}
    state = scaler.state_dict()
    # The scale is a float32 number on the device, so that nothing is rounded here.
    return tensors | {name: torch.tensor(state[key]) for name, key in SCALER_STATE.items() if key in state}


def _learned_tensors(method: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in method.state_dict().items()}


def optimizer_slots(method: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Collect the tensors of a torch optimizer by `<parameter>/<slot>`."""
    return {
        f"{name}/{slot}": value
        for name, parameter in method.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_learned(method: nn.Module, tensors: Mapping[str, Tensor], recipe: Recipe, source: Path) -> dict[str, Tensor]:
    """Load the learned tensors of a saved state and return the optimizer's slots.

    Raises UserError naming a tensor that does not fit `method` or its recipe, is missing, or that no saved state has.
    """
    slots = {name.removeprefix("optim/"): value for name, value in tensors.items() if name.startswith("optim/")}
    wanted = {f"param/{name}": value for name, value in method.state_dict().items()}
    # A training that was stopped while it waited for its first images has none.
    if slots:
        of_sgd = ["momentum_buffer"] if recipe.momentum else []
        expected = of_sgd if recipe.optimizer == "sgd" else ["exp_avg", "exp_avg_sq", "step"]
        learned = [(name, parameter) for name, parameter in method.named_parameters() if parameter.requires_grad]
        wanted |= {
            f"optim/{name}/{slot}": torch.zeros(()) if slot == "step" else parameter
            for name, parameter in learned
            for slot in expected
        }
    wanted |= {name: like for name, like in SCALER_LIKE.items() if name in tensors}
    # Averages are checked by `EpochAverage.load`.
    found = {name: value for name, value in tensors.items() if not name.startswith("average/")}
    if problem := find_misfit(wanted, found):
        raise cannot_resume(source, f"its tensors are not those of this training: {problem}")
    method.load_state_dict({name.removeprefix("param/"): tensors[name] for name in wanted if name.startswith("param/")})
    return slots


def fill_optimizer(method: nn.Module, optimizer: torch.optim.Optimizer, slots: Mapping[str, Tensor]) -> None:
    """Load what `optimizer_slots` returned."""
    names = {parameter: name for name, parameter in method.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in slots.items():
        name, _, slot = key.rpartition("/")
        state.setdefault(order.index(name), {})[slot] = value.clone()
    # The optimizer's own loader puts each slot on the device and in the type that the slot needs.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def fill_scaler(scaler: torch.amp.GradScaler, tensors: Mapping[str, Tensor]) -> None:
    """Load the scaler's state from the result of `training_tensors`; a disabled scaler has none."""
    state = {key: tensors[name].item() for name, key in SCALER_STATE.items() if name in tensors}
    scaler.load_state_dict(scaler.state_dict() | state)


def pack_tensors(tensors: dict[str, Tensor], plain: Mapping[str, Any]) -> bytes:
    """Encode tensors and plain JSON in the safetensors format."""
    # One metadata entry only: safetensors writes several in an order that differs from process to process.
    return dump_tensors(tensors, {"procap": json.dumps(plain, sort_keys=True, allow_nan=False)})


def unpack_tensors(data: bytes) -> tuple[dict[str, Tensor], str]:
    """Decode the result of `pack_tensors` to tensors and JSON. Raises SafetensorError or ValueError for other bytes."""
    tensors = load_tensors(data)
    return tensors, read_description(data[8 : 8 + int.from_bytes(data[:8], "little")])
