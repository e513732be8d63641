"""The frozen towers equal open_clip's encoders and the plain reference, for any plan, also compiled."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_runs import seeded
from tiny_geometry import IMAGE_METHODS, SHORT_GEOMETRY, SHORT_OPTIONS, UNTRAINED, open_clip_config

from benchmarks.qualitative.eigencam import last_tokens
from procap.clip import CLIP
from procap.compiled import compile_blocks
from procap.errors import UserError
from procap.geometry import Geometry
from procap.methods import build_method
from procap.plan import INPUT, Plan, TokenOp
from procap.text import LabelSpace

TEXTS = ["a photo of a dog.", "hi", "three small red circles on the left and a blue one", "a photo of a cat."]

CONFIGS = {
    "gelu": Geometry(32, 8, 64, 3, 2, 48, 2, 3, 77, 49408, 40, quick_gelu=False),
    "quickgelu": Geometry(48, 16, 128, 2, 2, 64, 4, 1, 77, 49408, 64, quick_gelu=True),
    "odd-mlp-and-heads": Geometry(28, 14, 88, 2, 1, 64, 2, 4, 32, 49408, 24, quick_gelu=False, vision_mlp=300),
    "joint-wider-than-towers": Geometry(32, 32, 64, 1, 4, 32, 1, 2, 77, 49408, 96, quick_gelu=True),
}

FULL_SIZE = {
    "ViT-B-32": Geometry(224, 32, 768, 12, 12, 512, 12, 8, 77, 49408, 512, quick_gelu=False),
    "ViT-B-16-quickgelu": Geometry(224, 16, 768, 12, 12, 512, 12, 8, 77, 49408, 512, quick_gelu=True),
}


def open_clip_twin(clip: CLIP):
    """open_clip's own model with the same weights, in training mode: there it takes our attention kernel."""
    import open_clip

    model = open_clip.CustomTextCLIP(**open_clip_config(clip.geometry))
    model.load_state_dict(clip.state_dict())
    return model.train()


def assert_same_encoders(geometry: Geometry) -> None:
    shortened = CLIP.random(geometry, seed=3)
    clip = shortened.without_optimizations()
    twin = open_clip_twin(clip)
    images = torch.randn(3, 3, geometry.image_size, geometry.image_size, generator=torch.Generator().manual_seed(5))
    ids = clip.tokenize(TEXTS)
    with torch.no_grad():
        pictures, full = twin.encode_image(images), twin.encode_text(ids)
        assert torch.equal(clip.encode_image(images), pictures)
        assert torch.equal(clip.encode_text(ids), full)
        assert (shortened.encode_image(images) - pictures).abs().max() <= 2e-6 * pictures.abs().max()
        assert (shortened.encode_text(ids) - full).abs().max() <= 2e-6 * full.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_plan_equals_open_clip_bit_for_bit(name):
    assert_same_encoders(CONFIGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_SIZE)
def test_empty_plan_equals_open_clip_at_full_size(name):
    assert_same_encoders(FULL_SIZE[name])


def test_frozen_and_in_evaluation_mode_whatever_is_asked(tiny_clip):
    holder = torch.nn.ModuleDict({"clip": tiny_clip}).train()
    assert not tiny_clip.training and not any(module.training for module in tiny_clip.modules())
    assert not any(p.requires_grad for p in holder.parameters())


def test_prompts_get_gradients_through_frozen_towers_and_weights_get_none(tiny_clip):
    from procap.plan import Plan, TokenOp

    tokens = torch.zeros(2, 64, requires_grad=True)
    ids = tiny_clip.tokenize(["X X cat.", "X X dog."])
    tiny_clip.encode_text(ids, Plan((TokenOp(INPUT, "replace", tokens, start=1),))).sum().backward()
    assert tokens.grad is not None and tokens.grad.abs().max() > 0
    assert all(p.grad is None for p in tiny_clip.parameters())


def test_digest_sees_one_changed_weight_and_the_activation(tiny_geometry):
    small = replace(tiny_geometry, vision_layers=1, text_layers=1)
    clip = CLIP.random(small, seed=1)
    state = {name: weight.clone() for name, weight in clip.state_dict().items()}
    state["visual.proj"][0, 0] += 1e-3
    assert CLIP.from_state(state, small).digest() != clip.digest()
    assert CLIP.from_state(clip.state_dict(), replace(small, quick_gelu=False)).digest() != clip.digest()


def test_bfloat16_autocast_stays_close_and_features_stay_float32(tiny_clip):
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    ids = tiny_clip.tokenize(TEXTS)
    with torch.no_grad():
        exact = [tiny_clip.encode_image(images), tiny_clip.encode_text(ids)]
        with torch.autocast("cpu", torch.bfloat16):
            rough = [tiny_clip.encode_image(images), tiny_clip.encode_text(ids)]
    for a, b in zip(exact, rough, strict=True):
        assert b.dtype == torch.float32
        assert not torch.equal(a, b), "autocast had no effect"
        assert torch.nn.functional.cosine_similarity(a, b).min() > 0.999


def test_tokens_are_open_clips(tiny_clip):
    import open_clip

    texts = [*TEXTS, "", "Déjà vu &amp; <end_of_text>", "  MANY   spaces\n", "日本語 🙂"]
    assert torch.equal(tiny_clip.tokenize(texts), open_clip.get_tokenizer("ViT-B-16")(texts))


def test_a_text_too_long_is_named_and_never_cut(tiny_clip):
    fits, long = "word " * 75, "word " * 76
    assert int(tiny_clip.tokenize([fits]).argmax()) == 76
    with pytest.raises(UserError, match=r"78 tokens long, CLIP reads 77.*word word"):
        tiny_clip.tokenize(["fine", long])


LAYERS = 4


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return CLIP.random(Geometry(24, 8, 96, LAYERS, 3, 64, LAYERS, 2, 77, 49408, 40, quick_gelu=True), seed=11)


def test_read_out_row_follows_tokens_put_before_it(clip):
    """The feature is the class token's state, also when rows come before it at the last block."""
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(7))
    plan = Plan((TokenOp(LAYERS - 1, "insert", torch.ones(3, 96), 0),))
    _, class_token = last_tokens(clip, images, plan)
    torch.testing.assert_close(clip.encode_image(images, plan), clip.visual.ln_post(class_token) @ clip.visual.proj)


@pytest.mark.parametrize("op", [
    TokenOp(LAYERS, "append", torch.zeros(1, 96)),
    TokenOp(-2, "append", torch.zeros(1, 96)),
    TokenOp(0, "replace", torch.zeros(2, 96), start=9),
    TokenOp(0, "insert", torch.zeros(2, 96), start=11),
    TokenOp(0, "replace", torch.zeros(2, 96), start=-1),
])  # fmt: skip
def test_operations_that_do_not_fit_are_refused(clip, op):
    with pytest.raises(ValueError, match=r"does not fit|the tower has blocks"):
        clip.encode_image(torch.zeros(1, 3, 24, 24), Plan((op,)))


def test_tokens_of_the_image_towers_width_are_refused_by_the_text_tower(clip):
    plan = Plan((TokenOp(INPUT, "replace", torch.zeros(2, 96), start=1),))
    with pytest.raises(ValueError, match=r"tokens \[2, 96\] do not fit a tower of width 64"):
        clip.encode_text(clip.tokenize(["a photo of a cat."]), plan)


def outcome(clip, name, names, precision=torch.float32):
    options = {"sentences": "templates"} if name == "coprompt" else {}
    options |= SHORT_OPTIONS.get(name, {})
    method: Any = build_method(name, clip, LabelSpace(names), options, seeded(1))
    size, device = clip.geometry.image_size, clip.device
    images, labels = torch.randn(3, 3, size, size, generator=seeded(2)).to(device), torch.arange(3, device=device)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        terms = method.loss(images, labels, tuple(noise.to(device) for noise in method.draw(seeded(3))))
        logits = method.classifier()(images)
    parameters = list(method.parameters())
    return [logits, *terms.values(), *torch.autograd.grad(sum(terms.values()), parameters, allow_unused=True)]


TRAINED = [name for name in IMAGE_METHODS if name not in UNTRAINED]


def compare(clip, backend, methods=TRAINED, **tolerance):
    """Compare a copy with compiled blocks and the model itself."""
    # Here, because importing the compiler takes a second.
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled = copy.deepcopy(clip)
    compile_blocks(compiled, backend)
    for name, count in (*((name, 5) for name in methods), ("procap", 20)):
        space = tuple("red " * (i % 3) + f"cat {i}" for i in range(count))
        for one, other in zip(outcome(clip, name, space), outcome(compiled, name, space), strict=True):
            torch.testing.assert_close(other, one, **tolerance)
    # Few classes end in one group of rows, many in several; both are compiled now.
    graphs = counters["stats"]["unique_graphs"]
    for count in (4, 60):
        outcome(compiled, "procap", tuple(f"cat {i}" for i in range(count)))
    assert 0 < counters["stats"]["unique_graphs"] == graphs <= 60


@pytest.mark.slow
def test_compiled_blocks_are_traced_whole_and_give_the_same_bits():
    """With the tracing of torch.compile but torch's own kernels. Another number of classes compiles nothing again."""
    clip = CLIP.random(replace(SHORT_GEOMETRY, vision_layers=2, text_layers=2), seed=0)
    compare(clip, "aot_eager", ("mma", "procap"), rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_kernels_change_nothing_but_rounding(short_clip):
    compare(short_clip, "inductor", rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_compiled_kernels_on_a_gpu_change_nothing_but_rounding(short_clip):
    compare(copy.deepcopy(short_clip).to("cuda"), "inductor", rtol=1e-3, atol=1e-4)
