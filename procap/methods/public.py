"""Translate a method's tensors to and from the state dicts that its public code saves.

A state dict of public code holds more than what was learned: the frozen towers, the embedded words around the learned
tokens, and modules that only training needs. An import checks the former two against this machine's backbone and
classes, and drops all three.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from procap.clip import CLIP, describe_differences
from procap.errors import UserError
from procap.methods import load_public
from procap.methods.method import Method, PublicLayout

FROZEN_TOLERANCE = 0.01
"""Largest difference of frozen tensors, relative to the largest element: half precision, and PromptSRC's averages."""

WORDS = ("token_prefix", "token_suffix", "token_midfix", "token_embedding", "tokenized_prompts")
"""Buffers of the words of the class prompts, at the end of a name; the public loaders drop them."""


def public_state(method: Method) -> dict[str, Tensor]:
    """Return what the public code of `method` loads: the learned tensors, and the frozen ones if it demands them.

    Raises UserError for a method without public code.
    """
    layout, parameters = layout_of(method), dict(method.named_parameters())
    names = {ours: _name_in_file(theirs, layout) for ours, theirs in method.public_names().items()}
    learned = {theirs: parameters[ours].detach().cpu().contiguous() for ours, theirs in names.items()}
    frozen = frozen_state(method.clip) if layout.strict else {}
    return {name: tensor.cpu().contiguous() for name, tensor in frozen.items()} | learned


def load_public_state(method: Method, state: Mapping[str, Tensor]) -> None:
    """Set the parameters of `method` to those in a state dict of its public code.

    Raises UserError if that is of another method, of other options, of another backbone, or of other classes than
    `method` has. Other words for the same classes are a warning.
    """
    layout = layout_of(method)
    parameters = dict(method.named_parameters())
    learned = {_name_in_file(theirs, layout): theirs for theirs in method.public_names().values()}
    wanted = {_name_in_file(theirs, layout): parameters[ours] for ours, theirs in method.public_names().items()}
    towers = {} if layout.module else frozen_state(method.clip) | {"logit_scale": method.clip.logit_scale}
    frozen = {name: tensor for name, tensor in towers.items() if name not in learned}

    def is_dropped(name: str) -> bool:
        return name in frozen or name.rpartition(".")[2] in WORDS or name.startswith(layout.unused)

    found = {name: tensor for name, tensor in state.items() if name in learned or not is_dropped(name)}
    if problems := describe_differences(wanted, found):
        raise UserError(f"no checkpoint of {type(method).__name__} with these options: " + "; ".join(problems))
    for name, ours in frozen.items():
        if name in state and not _is_close(state[name], ours):
            raise UserError(f"trained on other weights than those of {method.clip.name}: {name} differs")
    _check_classes(method, state)
    load_public(method, {theirs: found[name] for name, theirs in learned.items()})


def layout_of(method: Method) -> PublicLayout:
    """Return how the public code saves the method. Raises UserError for a method without public code."""
    if method.public_layout is None:
        raise UserError(f"{type(method).__name__} has no public code that reads or writes checkpoints")
    return method.public_layout


def frozen_state(clip: CLIP) -> dict[str, Tensor]:
    """Return the weights of the towers as the modules `image_encoder` and `text_encoder` of public code name them."""
    towers = {"visual.": "image_encoder.", "text.": "text_encoder."}
    return {
        towers[own] + name.removeprefix(own): tensor
        for name, tensor in clip.state_dict().items()
        for own in towers
        if name.startswith(own) and not name.startswith("text.token_embedding")
    }


def _name_in_file(name: str, layout: PublicLayout) -> str:
    return name.removeprefix(f"{layout.module}.") if layout.module else name


def _check_classes(method: Method, state: Mapping[str, Tensor]) -> None:
    """Compare the embedded words behind the learned tokens [C, T, D] with those of the method's own classes."""
    buffers = {name.rpartition(".")[2]: tensor for name, tensor in state.items()}
    words = buffers.get("token_suffix", buffers.get("token_embedding"))
    if words is None or words.dim() != 3:
        return
    classnames = method.space.classnames
    if len(words) != len(classnames):
        raise UserError(f"trained on {len(words)} classes, while there are {len(classnames)} here")
    # A context that is not in front of the class name moves the words.
    if method.class_slots is None:
        ours = method.clip.token_embedding(method.class_ids)[:, -words.shape[1] :]
        others = [name for name, a, b in zip(classnames, words, ours, strict=True) if not _is_close(a, b)]
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
