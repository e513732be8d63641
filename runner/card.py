"""The card of a checkpoint, which says what its tensors are, read without the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json

from procap.errors import UserError
from procap.text import LabelSpace
from runner.config import FrozenModel, RunConfig
from shards.errors import describe_invalid
from shards.files import require_regular
from shards.resolve import base_name

SCHEMA: Literal[1] = 1
MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


class CheckpointCard(FrozenModel):
    """Metadata of a checkpoint: enough to evaluate it without the data it was trained on."""

    checkpoint_schema: Literal[1] = SCHEMA
    config: RunConfig
    classnames: tuple[str, ...]
    template: str
    templates: tuple[str, ...]
    backbone_digest: str
    manifest_digest: str

    @property
    def space(self) -> LabelSpace:
        """The classes the prompts were trained on."""
        return LabelSpace(self.classnames, self.template, self.templates, base_name(self.config.dataset))


def read_description(header: bytes) -> str:
    """Return the JSON text that this program wrote into the header of a safetensors file, after its first 8 bytes.

    Raises ValueError if there is none.
    """
    content: Any = from_json(header)
    found = content.get("__metadata__") if isinstance(content, dict) else None
    text = found.get("procap") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError("it carries no description of this program")
    return text


def read_card(path: Path) -> CheckpointCard | None:
    """Read the card of a checkpoint; None if there is no file. Raises UserError if it is no checkpoint."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= MAX_HEADER else b""
        return CheckpointCard.model_validate_json(read_description(header), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise describe_no_checkpoint(path, error) from error


def describe_no_checkpoint(path: Path, error: Exception) -> UserError:
    """Explain in one line why `path` is no checkpoint."""
    reason = describe_invalid(error) if isinstance(error, ValidationError) else str(error).splitlines()[0]
    return UserError(f"{path} is no checkpoint of schema {SCHEMA} ({reason}); train again with --force")
