"""The nearest words to learned tokens are words, and really the nearest; the tokens are those of the method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from procap.methods import build_method
from procap.methods.method import Method
from procap.nearest_words import Words, first_text_tokens, text_means, vocabulary
from procap.tokenizer import simple_tokenizer
from procap.weights.mini import load_mini


@pytest.fixture(scope="module")
def words(tiny_clip) -> Words:
    return Words.of(tiny_clip)


@pytest.fixture
def build(tiny_clip, tiny_space):
    def made(method: str, **options) -> Method:
        return build_method(method, tiny_clip, tiny_space, options, torch.Generator().manual_seed(3))

    return made


def test_words_are_single_tokens_of_letters():
    kept, tokenizer = vocabulary(), simple_tokenizer()
    for text in ("photo", "a", "of", "flower", "café"):
        assert kept[simple_tokenizer().encode(text)[0]] == text
    left_out = {tokenizer.encoder[symbols] for symbols in ("ph", ".</w>", "2</w>", "A</w>", "a")}
    assert not {tokenizer.sot_token_id, tokenizer.eot_token_id, *left_out} & set(kept)
    for token, text in list(kept.items())[::397]:
        assert tokenizer.decode([token]).strip() == text
        assert simple_tokenizer().encode(text) == [token]
    # A third of the vocabulary is fragments and signs.
    assert 30_000 < len(kept) < 36_000


@pytest.mark.parametrize("measure", ["cosine", "euclid"])
def test_nearest_are_those_of_a_look_at_every_word(tiny_clip, words, measure):
    table = tiny_clip.text.token_embedding.weight.double().numpy()
    ids = sorted(vocabulary())
    tokens = torch.cat([0.02 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), torch.ones(1, 64)])
    for token, nearest in zip(tokens.double().numpy(), words.nearest(tokens, 4, measure), strict=True):
        if measure == "cosine":
            values = table[ids] @ token / np.linalg.norm(table[ids], axis=1) / np.linalg.norm(token)
            order = np.argsort(-values)[:4]
        else:
            values = np.linalg.norm(table[ids] - token, axis=1)
            order = np.argsort(values)[:4]
        assert [near.token for near in nearest] == [ids[place] for place in order]
        assert [near.word for near in nearest] == [vocabulary()[ids[place]] for place in order]
        assert [near.value for near in nearest] == pytest.approx(values[order].tolist())


def test_words_that_share_an_embedding_are_left_out():
    """Of mini only the words it was trained on: all others have their mean."""
    kept = Words.of(load_mini())
    assert {"photo", "flower", "red"} <= set(kept.texts) and "jekyll" not in kept.texts
    assert len(torch.unique(kept.embeddings, dim=0)) == len(kept.ids) < 1000


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and torch.equal(found, expected)


def test_the_tokens_are_those_that_a_method_learns(build):
    coop, maple, procap = build("coop"), build("maple"), build("procap", zero_output=False)
    assert same(first_text_tokens(coop), coop.context) and same(text_means(coop), coop.context)
    assert same(first_text_tokens(maple), maple.context)
    assert same(text_means(procap), procap.text_mu[0])
    read = procap.refine(procap.vision_mu, procap.text_mu)[1][0]
    assert same(first_text_tokens(procap), read) and not same(read, procap.text_mu[0])


def test_without_tokens_for_all_classes_there_are_none(build):
    assert first_text_tokens(build("zeroshot")) is None
    assert text_means(build("coop", csc=True, ctx_init="")) is None
