"""CLIP's byte-pair tokenizer, from open_clip's wheel; works offline.

Shapes: C texts, T = context length.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.errors import UserError


@lru_cache(maxsize=1)
def simple_tokenizer() -> Any:
    """Return open_clip's `SimpleTokenizer`."""
    package = importlib.util.find_spec("open_clip")
    assert package is not None and package.origin is not None
    # Importing open_clip itself also imports timm and every architecture, which takes seconds; its tokenizer does not.
    file = Path(package.origin).parent / "tokenizer.py"
    spec = importlib.util.spec_from_file_location("procap_open_clip_tokenizer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # The one that the module makes when it is imported; another would read the vocabulary again.
    return module._tokenizer


@lru_cache
def model_tokenizer(model: str) -> Any:
    """Return open_clip's tokenizer of a model with another vocabulary; UserError if its package or files are absent."""
    from open_clip import get_tokenizer

    try:
        return get_tokenizer(model)
    except (ImportError, OSError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer of {model} needs the package transformers, and its files: {reason}") from error


def tokenize(texts: Sequence[str], context_length: int = 77) -> Tensor:
    """Tokenize texts to ids [C, T]: start, the text's tokens, end, zeros. UserError for a text that is too long."""
    tokenizer = simple_tokenizer()
    ids = torch.zeros(len(texts), context_length, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        tokens = [tokenizer.sot_token_id, *tokenizer.encode(text), tokenizer.eot_token_id]
        if len(tokens) > context_length:
            raise UserError(f"text is {len(tokens)} tokens long, CLIP reads {context_length}: shorten {text!r}")
        row[: len(tokens)] = torch.tensor(tokens)
    return ids
