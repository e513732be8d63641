"""Inference: computed once, equal to recomputing everything, and explained by words and image regions."""

import random
from dataclasses import replace
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from small_runs import perturb, pictures, seeded
from tiny_geometry import GEOMETRY
from torch.nn.functional import normalize

from benchmarks.qualitative import eigencam
from benchmarks.qualitative.learned_prompts import Words, first_text_tokens, text_means, vocabulary
from procap import methods, reference, teacher
from procap.clip import CLIP
from procap.methods.prompts import deep_plans
from procap.plan import INPUT, Plan, TokenOp
from procap.text import LabelSpace
from procap.tokenizer import simple_tokenizer

CASES: list[tuple[str, dict[str, Any]]] = [
    ("zeroshot", {}),
    ("zeroshot", {"templates": "ensemble"}),
    ("coop", {}),
    ("cocoop", {}),
    ("maple", {}),
    ("procap", {}),
    ("procap", {"class_prompt": "template", "deep_tokens": "independent"}),
    ("procap", {"cross_attention": False}),
]

OTHERS = LabelSpace(("dog", "permanent_crop_land", "blue square"), "{} texture.", ("a close-up photo of a {} texture",))


def trained(name, clip, space, **options):
    return perturb(methods.build_method(name, clip, space, options, seeded()), seed=11)


def global_states():
    array = numpy.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), random.getstate(), array["key"].tolist(), array["pos"]


@pytest.mark.parametrize("name, options", CASES)
@pytest.mark.parametrize("swapped", [False, True], ids=["own names", "other names"])
def test_classifier_equals_recomputing_everything(tiny_clip, tiny_space, name, options, swapped):
    method = trained(name, tiny_clip, tiny_space, **options)
    space = OTHERS if swapped else tiny_space
    logits = method.classifier(space)(pictures())
    assert logits.shape == (3, len(space.classnames)) and logits.dtype == torch.float32
    expected = reference.with_plain_encoders(method).classifier(space)(pictures())
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("name, options", CASES)
def test_other_class_names_need_no_retraining(tiny_clip, tiny_space, name, options):
    """The same parameters in a method made for the other names classify alike."""
    method = trained(name, tiny_clip, tiny_space, **options)
    there = methods.build_method(name, tiny_clip, OTHERS, options, seeded(5))
    there.load_state_dict(method.state_dict())
    assert torch.equal(method.classifier(OTHERS)(pictures()), there.classifier()(pictures()))


@pytest.mark.parametrize("name, options", CASES)
def test_inference_draws_no_random_number(tiny_clip, tiny_space, name, options):
    given = seeded(3)
    method = methods.build_method(name, tiny_clip, tiny_space, options, given)
    torch.manual_seed(1)
    states = [given.get_state().tolist(), *global_states()]
    first = method.classifier()(pictures())
    torch.manual_seed(2)
    assert torch.equal(first, method.classifier()(pictures()))
    torch.manual_seed(1)
    method.classifier(OTHERS)(pictures())
    assert states == [given.get_state().tolist(), *global_states()]


@pytest.mark.parametrize("name, options", CASES)
def test_class_text_is_encoded_once_unless_it_depends_on_the_image(tiny_clip, tiny_space, name, options, monkeypatch):
    classifier = trained(name, tiny_clip, tiny_space, **options).classifier()
    calls = []
    encode = type(tiny_clip).encode_text

    def counted(*args, **more):
        calls.append(args)
        return encode(*args, **more)

    monkeypatch.setattr(type(tiny_clip), "encode_text", counted)
    classifier(pictures())
    classifier(pictures())
    assert len(calls) == (2 if name == "cocoop" else 0)


@pytest.mark.parametrize("name, options", CASES)
def test_batches_do_not_change_logits_and_no_gradient_is_recorded(tiny_clip, tiny_space, name, options):
    classifier = trained(name, tiny_clip, tiny_space, **options).classifier()
    images = pictures(5)
    whole = classifier(images)
    assert not whole.requires_grad and classifier.num_classes == 5
    parts = torch.cat([classifier(images[:2]), classifier(images[2:])])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["coop", "cocoop", "maple", "procap"])
def test_a_classifier_is_a_snapshot(tiny_clip, tiny_space, name):
    """Training on after `classifier()` changes the next one, not this one; plain tokens included."""
    options = {"cross_attention": False, "gaussian": False} if name == "procap" else {}
    method = trained(name, tiny_clip, tiny_space, **options)
    classifier = method.classifier()
    before = classifier(pictures())
    with torch.no_grad():
        for parameter in method.parameters():
            parameter += 0.1
    assert torch.equal(classifier(pictures()), before)
    assert not torch.equal(method.classifier()(pictures()), before)


@pytest.mark.parametrize("name, options", CASES)
def test_bfloat16_inference_keeps_logits_in_float32(tiny_clip, tiny_space, name, options):
    method = trained(name, tiny_clip, tiny_space, **options)
    exact = method.classifier()(pictures())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = method.classifier()(pictures())
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast, exact, rtol=0, atol=0.5)


TEMPLATES = ("a photo of a {}.", "a blurry drawing of many {} in the snow", "{}")


def test_one_template_is_zero_shot_clip_under_either_policy(tiny_clip, tiny_space):
    prompts = [f"a photo of a {name}." for name in tiny_space.names()]
    expected = normalize(tiny_clip.encode_text(tiny_clip.tokenize(prompts)), dim=-1)
    for average in ("normalise-first", "average-first"):
        bank = teacher.text_bank(tiny_clip, tiny_space, TEMPLATES[:1], average)
        torch.testing.assert_close(bank, expected, atol=3e-6, rtol=0)


def test_policies_average_what_they_say_and_differ(tiny_clip, tiny_space):
    prompts = [[template.format(name) for name in tiny_space.names()] for template in TEMPLATES]
    each = torch.stack([tiny_clip.encode_text(tiny_clip.tokenize(texts)) for texts in prompts])
    first = teacher.text_bank(tiny_clip, tiny_space, TEMPLATES, "normalise-first")
    later = teacher.text_bank(tiny_clip, tiny_space, TEMPLATES, "average-first")
    torch.testing.assert_close(first, normalize(normalize(each, dim=-1).mean(0), dim=-1), atol=3e-6, rtol=0)
    torch.testing.assert_close(later, normalize(each.mean(0), dim=-1), atol=3e-6, rtol=0)
    assert (first - later).abs().max() > 1e-4


def test_banks_ignore_autocast_and_carry_no_gradient(tiny_clip, tiny_space):
    exact = teacher.text_bank(tiny_clip, tiny_space, TEMPLATES)
    with torch.autocast("cpu", torch.bfloat16):
        inside = teacher.text_bank(tiny_clip, tiny_space, TEMPLATES)
    assert torch.equal(exact, inside) and not exact.requires_grad


@pytest.fixture
def build(tiny_clip, tiny_space):
    return lambda method, **options: methods.build_method(method, tiny_clip, tiny_space, options, seeded(3))


def test_words_are_single_tokens_of_letters():
    kept, tokenizer = vocabulary(), simple_tokenizer()
    for text in ("photo", "a", "of", "flower", "café"):
        assert kept[simple_tokenizer().encode(text)[0]] == text
    left_out = {tokenizer.encoder[symbols] for symbols in ("ph", ".</w>", "2</w>", "A</w>", "a")}
    assert not {tokenizer.sot_token_id, tokenizer.eot_token_id, *left_out} & set(kept)
    for token, text in list(kept.items())[::397]:
        assert tokenizer.decode([token]).strip() == text and simple_tokenizer().encode(text) == [token]
    # A third of the vocabulary is fragments and signs.
    assert 30_000 < len(kept) < 36_000


def test_nearest_are_those_of_a_look_at_every_word(tiny_clip):
    table = tiny_clip.text.token_embedding.weight.double().numpy()
    ids = sorted(vocabulary())
    tokens = torch.cat([0.02 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), torch.ones(1, 64)])
    for token, nearest in zip(tokens.double().numpy(), Words.of(tiny_clip).nearest(tokens, 4), strict=True):
        values = table[ids] @ token / np.linalg.norm(table[ids], axis=1) / np.linalg.norm(token)
        order = np.argsort(-values)[:4]
        assert [near["token"] for near in nearest] == [ids[place] for place in order]
        assert [near["word"] for near in nearest] == [vocabulary()[ids[place]] for place in order]
        assert [near["value"] for near in nearest] == pytest.approx(values[order].tolist())


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return found is not None and torch.equal(found, expected)


def test_the_tokens_are_those_that_a_method_learns(build):
    coop, maple, procap = build("coop"), build("maple"), build("procap", zero_output=False)
    assert same(first_text_tokens(coop), coop.context) and same(text_means(coop), coop.context)
    assert same(first_text_tokens(maple), maple.context) and same(text_means(procap), procap.text_mu[0])
    read = procap.refine(procap.vision_mu, procap.text_mu)[1][0]
    assert same(first_text_tokens(procap), read) and not same(read, procap.text_mu[0])


def test_without_tokens_for_all_classes_there_are_none(build):
    assert first_text_tokens(build("zeroshot")) is None


GRID, DEPTH = 6, 3
PATCHES = GRID * GRID


@pytest.fixture(scope="module")
def clip() -> CLIP:
    """Six by six patches, 36 of width 128."""
    geometry = replace(GEOMETRY, image_size=48, patch_size=8, vision_layers=4, text_layers=3)
    return CLIP.random(geometry, seed=1, name="grid")


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def deep(clip: CLIP, count: int) -> Plan:
    """Prompts of `count` tokens in `DEPTH` layers, in MaPLe's and ProCAP's slots; none for 0."""
    if not count:
        return Plan()
    vision = [drawn(count, 128, seed=layer) for layer in range(DEPTH)]
    return deep_plans(clip, vision, [drawn(count, 64)] * DEPTH)[0]


def by_svd(patches: np.ndarray, class_token: np.ndarray) -> np.ndarray:
    """The map [N] of one image, straight from the definition."""
    centred = patches - patches.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    direction = directions[0] * np.sign((class_token - patches.mean(axis=0)) @ directions[0])
    places = centred @ direction
    return (places - places.min()) / (places.max() - places.min())


@pytest.mark.parametrize(("grid", "width"), [(2, 64), (7, 64), (8, 64), (9, 64), (14, 96)])
def test_maps_are_those_of_a_direct_svd(grid, width):
    """Fewer patches than dimensions, as many, and more."""
    for seed in range(3):
        # Directions of different strengths, as real tokens have them, and a mean far from zero.
        spread = torch.linspace(3, 0.1, width)
        patches = drawn(3, grid * grid, width, seed=seed) * spread + 5 * drawn(width, seed=seed + 100)
        class_token = drawn(3, width, seed=seed + 200, scale=10)
        maps = eigencam.eigencam(patches, class_token)
        assert maps.shape == (3, grid, grid)
        for image in range(3):
            expected = by_svd(patches[image].double().numpy(), class_token[image].double().numpy())
            np.testing.assert_allclose(maps[image].flatten().numpy(), expected, atol=1e-9)


def test_maps_with_prompts_never_oppose_those_without(clip):
    images = drawn(8, 3, 48, 48)
    plain = eigencam.image_maps(clip, images).flatten(1)
    for count in (2, 4):
        found = eigencam.image_maps(clip, images, deep(clip, count)).flatten(1)
        assert all(np.corrcoef(a, b)[0, 1] > 0 for a, b in zip(found.numpy(), plain.numpy(), strict=True))
        assert not torch.allclose(found, plain, atol=1e-3)


def insertions(count: int) -> Plan:
    """Tokens before the class token, between it and the patches, among the patches, and behind them, layer by layer."""
    return Plan(
        (
            TokenOp(INPUT, "insert", drawn(count, 128, seed=1), start=0),
            TokenOp(1, "insert", drawn(count, 128, seed=2), start=count + 1),
            TokenOp(2, "append", drawn(count, 128, seed=3)),
            TokenOp(3, "insert", drawn(count, 128, seed=4), start=2 * count + 4),
        )
    )


@pytest.mark.parametrize("count", [0, 2, 4])
@pytest.mark.parametrize("optimizations", ["all", "none"])
def test_tokens_are_what_the_last_block_gives_without_prompts(clip, count, optimizations):
    """Seen by a hook on the block, which sees every row in the plain tower."""
    images, plain = drawn(2, 3, 48, 48), clip.without_optimizations()
    seen: list[torch.Tensor] = []
    hook = clip.visual.transformer.resblocks[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    rows = {
        "slots": (deep(clip, count), [0, *range(1, 1 + PATCHES)]),
        "everywhere": (
            insertions(count) if count else Plan(),
            [count, *range(2 * count + 1, 2 * count + 4), *range(3 * count + 4, 3 * count + 1 + PATCHES)],
        ),
    }
    try:
        for plan, kept in rows.values():
            with torch.no_grad():
                plain.encode_image(images, plan)
                patches, class_token = eigencam.last_tokens(clip if optimizations == "all" else plain, images, plan)
            torch.testing.assert_close(patches, seen[0][:, kept[1:]], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(class_token, seen[0][:, kept[0]], atol=1e-4, rtol=1e-4)
            assert patches.shape == (2, PATCHES, 128)
            seen.clear()
    finally:
        hook.remove()
