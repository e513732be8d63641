"""Read and write checkpoints of public trainers, and translate their tensors to and from those of a method.

A state dict of public code holds more than what was learned: the frozen towers, the embedded words around the learned
tokens, and modules that only training needs. An import checks the former two against this machine's backbone and
classes, and drops all three.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from procap.clip import CLIP, describe_differences
from procap.errors import UserError
from procap.methods.method import Method, PublicLayout
from procap.weights.files import read_tensors

FROZEN_TOLERANCE = 0.01
"""Largest difference of frozen tensors, relative to the largest element: half precision, and PromptSRC's averages."""

WORDS = ("token_prefix", "token_suffix", "token_midfix", "token_embedding", "tokenized_prompts", "prompt_embeddings")
"""Buffers of the words of the class prompts, at the end of a name; the public loaders drop them."""


@dataclass(frozen=True)
class PublicFile:
    """The tensors of a file under the names of the public code; epoch: how many were trained, None if not recorded."""

    tensors: dict[str, Tensor]
    epoch: int | None


def read_public(path: Path) -> PublicFile:
    """Read a checkpoint of Dassl, or safetensors, without executing anything in it. UserError for any other file."""
    tensors, others = read_tensors(path)
    # A number in files of Dassl, a text in safetensors, and anything or nothing elsewhere.
    text = str(others.get("epoch"))
    epoch = int(text) if text.isdecimal() else None
    return PublicFile(tensors, epoch)


def pack_public(file: PublicFile, format: str) -> bytes:
    """Encode a checkpoint as Dassl writes it ("dassl", plain values and tensors only) or as "safetensors"."""
    if format == "safetensors":
        from safetensors.torch import save

        return save(file.tensors, {"epoch": str(file.epoch)})
    content = {"state_dict": file.tensors, "epoch": file.epoch}
    buffer = io.BytesIO()
    torch.save(content | {"optimizer": None, "scheduler": None, "val_result": None}, buffer)
    return buffer.getvalue()


def public_state(method: Method) -> dict[str, Tensor]:
    """Return the learned tensors by the names in the public code of `method`, whose loader takes them alone.

    Raises UserError for a method without public code.
    """
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _learned(method).items()}


def load_public_state(method: Method, state: Mapping[str, Tensor]) -> None:
    """Set the parameters of `method` to those in a state dict of its public code.

    Raises UserError if that is of another method, of other options, of another backbone, or of other classes than
    `method` has. Other words for the same classes are a warning.
    """
    layout, learned = layout_of(method), _learned(method)
    # A file of one part of the model holds no towers.
    towers = {} if layout.module else frozen_state(method.clip) | {"logit_scale": method.clip.logit_scale}
    frozen = {name: tensor for name, tensor in towers.items() if name not in learned}

    def is_dropped(name: str) -> bool:
        return name in frozen or name.rpartition(".")[2] in WORDS or name.startswith(layout.unused)

    # MoCoOp's code also saves the learned vectors of a text without words, which are none.
    tensors = {
        name: tensor for name, tensor in state.items() if tensor.numel() and (name in learned or not is_dropped(name))
    }
    problems = describe_differences(learned, tensors)
    problems += [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()][:3]
    if problems:
        raise UserError(f"no checkpoint of {type(method).__name__} with these options: " + "; ".join(problems))
    for name, ours in frozen.items():
        if name in state and not _is_close(state[name], ours):
            raise UserError(f"trained on other weights than those of {method.clip.name}: {name} differs")
    _check_classes(method, state)
    with torch.no_grad():
        for name, parameter in learned.items():
            parameter.copy_(tensors[name])


def layout_of(method: Method) -> PublicLayout:
    """Return how the public code saves the method. Raises UserError for a method without public code."""
    if method.public_layout is None:
        raise UserError(
            f"checkpoints of {type(method).__name__}'s public code are not supported: to use a run elsewhere, copy its "
            "folder, for which `procap predict` and `procap eval` work"
        )
    return method.public_layout


def frozen_state(clip: CLIP) -> dict[str, Tensor]:
    """Return the weights of the towers as the modules `image_encoder` and `text_encoder` of public code name them."""
    towers = {"visual.": "image_encoder.", "text.": "text_encoder."}
    # Public text encoders read embedded prompts and have no table of words; `unused` names SkipT's, which has one.
    return {
        theirs + name.removeprefix(ours): tensor
        for name, tensor in clip.state_dict().items()
        for ours, theirs in towers.items()
        if name.startswith(ours) and not name.startswith("text.token_embedding")
    }


def public_names(method: Method) -> dict[str, str]:
    """Map the name of each parameter to its name in the public code of the method; empty without public code.

    So are the buffers that the public code saves, such as the statistics of a batch norm.
    """
    known = dict(method.public_layout.names) if method.public_layout else {}
    parameters = dict(method.named_parameters())
    names = {}
    for name in method.state_dict() if known else ():
        # With a point at the end, so that "text" does not fit "text_mu".
        fitting = [start for start in known if f"{name}.".startswith(f"{start}.")]
        if fitting or name in parameters:
            ours = max(fitting, key=len)
            rest = name.removeprefix(ours).lstrip(".").replace("/", ".")
            names[name] = known[ours].format(rest, *rest.split("."))
    return names


def public_parameters(method: Method) -> dict[str, Tensor]:
    """Return the parameters, and buffers, by their names in the public code of the method."""
    tensors = method.state_dict(keep_vars=True)
    return {theirs: tensors[ours] for ours, theirs in public_names(method).items()}


def _learned(method: Method) -> dict[str, Tensor]:
    """Return the tensors of `public_parameters` by their names in a file of the public code."""
    module = f"{layout_of(method).module}."
    return {theirs.removeprefix(module): tensor for theirs, tensor in public_parameters(method).items()}


def _check_classes(method: Method, state: Mapping[str, Tensor]) -> None:
    """Compare the embedded words behind the learned tokens [C, T, D] with those of the method's own classes."""
    buffers = {name.rpartition(".")[2]: tensor for name, tensor in state.items()}
    whole = buffers.get("token_embedding", buffers.get("prompt_embeddings"))
    words = buffers.get("token_suffix", whole)
    if words is None or words.dim() != 3:
        return
    classnames = method.space.classnames
    # PLOT++ has several texts of each class, those of all classes behind each other.
    texts = len(method.prompts.ids) // len(classnames)
    if len(words) != len(method.prompts.ids):
        raise UserError(f"trained on {len(words) // texts} classes, while there are {len(classnames)} here")
    # A suffix has the columns from behind the learned tokens to the end of the context, a whole table all columns.
    ours = method.clip.token_embedding(method.prompts.ids)[:, -words.shape[1] :]
    pairs = zip(classnames * texts, words, ours, strict=True)
    others = list(dict.fromkeys(name for name, a, b in pairs if not _is_close(a, b)))
    if others:
        warnings.warn(
            f"the checkpoint was trained with other words for {len(others)} of {len(classnames)} classes, "
            f"such as {others[0]!r}; was it another data set?",
            stacklevel=2,
        )


def _is_close(theirs: Tensor, ours: Tensor) -> bool:
    if theirs.shape != ours.shape:
        return False
    largest = ours.abs().max() if ours.numel() else torch.zeros(())
    return bool((theirs.to(ours) - ours).abs().max() <= FROZEN_TOLERANCE * largest)
