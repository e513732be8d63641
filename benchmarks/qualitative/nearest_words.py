"""The words of CLIP's vocabulary whose embeddings lie nearest to learned text tokens.

Source: Zhou et al. 2022 (CoOp), section 4.2, "Interpreting the learned prompts", with cosines instead of distances:
learned tokens differ in length, and CLIP normalises its rows.

Shapes: V token ids, W words, P learned tokens, D text width.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from procap.clip import CLIP
from procap.methods.method import Method
from procap.plan import INPUT
from procap.tokenizer import simple_tokenizer

WORD_RULE = (
    "a word is a token of small letters (or letters without case) that ends a word; left out are fragments that words "
    "only begin with, punctuation, digits, control tokens, and tokens whose embedding is also that of another token"
)

WORD_END = "</w>"


@dataclass(frozen=True)
class NearWord:
    """A word, its token id, and its cosine similarity to a learned token."""

    word: str
    token: int
    value: float


@dataclass(frozen=True)
class Words:
    """The words of a model: token ids [W], their text, and their embeddings [W, D] in float64 on the CPU."""

    ids: Tensor
    texts: tuple[str, ...]
    embeddings: Tensor

    @classmethod
    def of(cls, clip: CLIP) -> Words:
        """Collect the words of `clip` that `WORD_RULE` keeps."""
        table = clip.text.token_embedding.weight.detach().cpu().float()
        rows = [row.tobytes() for row in table.numpy()]
        uses = Counter(rows)
        chosen = {token: text for token, text in vocabulary().items() if token < len(rows) and uses[rows[token]] == 1}
        ids = torch.tensor(list(chosen), dtype=torch.long)
        return cls(ids, tuple(chosen.values()), table[ids].double())

    def nearest(self, tokens: Tensor, count: int = 5) -> list[list[NearWord]]:
        """Find the `count` nearest words to each of `tokens` [P, D], nearest first; ties go to the lower id."""
        values = F.normalize(tokens.detach().cpu().double(), dim=-1) @ F.normalize(self.embeddings, dim=-1).T
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        return [
            [NearWord(self.texts[word], int(self.ids[word]), float(row[word])) for word in best]
            for row, best in zip(values, order.tolist(), strict=True)
        ]


@lru_cache(maxsize=1)
def vocabulary() -> dict[int, str]:
    """List token id and text of the words of CLIP's vocabulary, by the parts of `WORD_RULE` that need no weights."""
    tokenizer = simple_tokenizer()
    words = {}
    for token, symbols in sorted(tokenizer.decoder.items()):
        if not symbols.endswith(WORD_END):
            continue
        data = bytes(tokenizer.byte_decoder[symbol] for symbol in symbols.removesuffix(WORD_END))
        # A token with incomplete characters (some of their bytes) is a fragment of a word.
        text = data.decode("utf-8", errors="replace")
        # The tokenizer lowers the case of prompts, so words of its table with capital letters never occur in one.
        if text.isalpha() and text == text.lower():
            words[int(token)] = text
    return words


def first_text_tokens(method: Method) -> Tensor | None:
    """Return the learned tokens [P, D] in the input of the text tower, before positions are added.

    For ProCAP these are the means after the first level of cross-attention. None if nothing is learned there, if every
    class has its own tokens, or if several operations act on the input.
    """
    with torch.no_grad():
        _, plan = method.plans(method.prompts)
    first = [op.tokens for op in plan.tokens if op.layer == INPUT]
    return first[0].detach() if len(first) == 1 and first[0].dim() == 2 else None


def text_means(method: Method) -> Tensor | None:
    """Return the means [P, D] of a method's Gaussian text tokens before refinement; else `first_text_tokens`.

    A method holds such means as `text_mu` [S, P, D], the first set first.
    """
    means = getattr(method, "text_mu", None)
    return means[0].detach() if isinstance(means, Tensor) and means.dim() == 3 else first_text_tokens(method)
