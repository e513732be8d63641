"""Every saving of the towers is exact, really saves the work it names, and leaves the host out of a training step."""

import gc
import subprocess
import sys
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import mark_slow, seeded
from tiny_geometry import SHORT_OPTIONS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from procap import attention, errors, methods, prompt_packing, reference, towers
from procap.clip import CLIP
from procap.geometry import Geometry
from procap.plan import BLOCKS, INPUT, Plan, TokenOp
from procap.text import LabelSpace

TOLERANCE = 1e-4
"""Relative to the largest entry, in float32: the order of sums differs, nothing else."""

CHOICES = ("optimized", "plain", "chunked", "grouped")

GEOMETRIES = {
    "quickgelu": Geometry(24, 8, 96, 3, 3, 64, 4, 2, 77, 49408, 40, quick_gelu=True),
    "gelu-odd": Geometry(28, 14, 88, 2, 1, 48, 3, 3, 40, 49408, 24, quick_gelu=False, vision_mlp=300),
    "one-layer": Geometry(32, 16, 64, 1, 2, 32, 1, 1, 32, 49408, 16, quick_gelu=True),
}
WORDS = ("cat", "annual crop land", "centrifuge", "red circle", "a", "dog and horse and cow and sheep and goat", "x y")


@pytest.fixture(scope="module")
def models() -> dict[str, CLIP]:
    return {name: CLIP.random(geometry, seed=4) for name, geometry in GEOMETRIES.items()}


@contextmanager
def chosen(clip, choice):
    """`clip` with all optimizations, without any, with chunks of a few prompts, or with small groups of rows."""
    rows = 16 if choice == "chunked" else towers.CHUNK_ROWS
    group = 8 if choice == "grouped" else prompt_packing.GROUP_ROWS
    with patch.object(towers, "CHUNK_ROWS", rows), patch.object(prompt_packing, "GROUP_ROWS", group):
        yield clip.without_optimizations() if choice == "plain" else clip


def gradients(features: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, features.numel()).view_as(features)
    if not features.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad((features * weight).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def assert_near(ours: Tensor, truth: Tensor, what: object) -> None:
    assert ours.shape == truth.shape, what
    assert (ours - truth).detach().abs().max() <= TOLERANCE * max(1e-3, float(truth.detach().abs().max())), what


def assert_exact(clip: CLIP, choice: str, batch: Tensor, plan: Plan, text: bool) -> None:
    learned = [op.tokens for op in plan.tokens] + list(plan.weights.values())
    learned += [parameter for adapter in plan.adapters.values() for parameter in adapter.parameters()]
    learned = [tensor for tensor in learned if tensor.requires_grad]
    plain_clip = reference.PlainCLIP(clip)
    plain = plain_clip.encode_text(batch, plan) if text else plain_clip.encode_image(batch, plan)
    with chosen(clip, choice) as model:
        fast = model.encode_text(batch, plan) if text else model.encode_image(batch, plan)
    assert_near(fast, plain, choice)
    if plan.read_op is not None:
        rows, plain_rows = (each.encode_image_rows(batch, plan)[1] for each in (model, plain_clip))
        assert_near(rows, plain_rows, choice)
        fast, plain = torch.cat([fast.flatten(), rows.flatten()]), torch.cat([plain.flatten(), plain_rows.flatten()])
    if not text:
        (patches, image), (plain_patches, _) = (each.encode_patches(batch, plan) for each in (model, plain_clip))
        assert_near(image, plain_clip.encode_image(batch, plan), choice)
        assert_near(patches, plain_patches, choice)
        fast, plain = (
            torch.cat([fast.flatten(), patches.flatten()]),
            torch.cat([plain.flatten(), plain_patches.flatten()]),
        )
    for ours, truth in zip(gradients(fast, learned), gradients(plain, learned), strict=True):
        assert_near(ours, truth, choice)


def changed(tokens, tower, adapted, replaced, read):
    """Make a plan of token operations, adapters beside some blocks, and learned copies of some weights."""
    draw, width = seeded(8), tower.get_parameter("positional_embedding").shape[1]
    adapters: dict[int, nn.Module] = {}
    for layer in adapted:
        adapters[layer] = nn.Linear(width, width)
        for parameter in adapters[layer].parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    weights = {}
    for name in sorted(replaced):
        own = tower.get_parameter(name).detach()
        weights[name] = (own + 0.05 * torch.randn(own.shape, generator=draw)).requires_grad_()
    inserted = [index for index, op in enumerate(tokens) if op.mode != "replace"]
    return Plan(tuple(tokens), adapters, weights, inserted[-1] if read and inserted else None)


def replaceable(layers, after):
    """Names of weights of a tower that a plan may replace."""
    parts = ("ln_1.weight", "attn.in_proj_weight", "attn.out_proj.bias", "ln_2.bias", "mlp.c_fc.weight")
    names = [f"{BLOCKS}{layer}.{part}" for layer in range(layers) for part in parts]
    return st.sets(st.sampled_from([*names, *after]), max_size=3)


@st.composite
def text_cases(draw: Any) -> tuple[Any, ...]:
    """A geometry, class names, operations that no end token can be overwritten by, and some optimizations."""
    name = draw(st.sampled_from(list(GEOMETRIES)))
    words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=7))
    ops, length = [], 6
    layers = GEOMETRIES[name].text_layers
    for layer in sorted(draw(st.lists(st.integers(INPUT, layers - 1), max_size=4))):
        # At the input there is no room behind 77 columns; later rows need no position.
        mode = draw(st.sampled_from(["replace", "replace", "insert", "append" if layer >= 0 else "insert"]))
        count = draw(st.integers(1, 3))
        start = draw(st.integers(0, length - count if mode == "replace" else length))
        ops.append((layer, mode, count, start, draw(st.sampled_from(["all", "row", "set"])), draw(st.booleans())))
        # Six rows hold the start token, four placeholders and a word; rows put behind the prompts are not addressed.
        length += count if mode == "insert" else 0
    adapted = draw(st.sets(st.integers(0, layers - 1), max_size=2))
    replaced = draw(replaceable(layers, ("ln_final.weight", "text_projection")))
    return name, words, ops, adapted, replaced, draw(st.sampled_from(CHOICES))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=text_cases())
def test_text_tower_is_exact_under_any_plan(models, case):
    name, words, ops, adapted, replaced, choice = case
    clip, draw = models[name], seeded(len(words))
    prompts = [f"X X X X {word}." for word in words]
    ids = clip.tokenize(prompts)
    plan = []
    for layer, mode, count, start, form, learned in ops:
        shape = {"all": (), "row": (len(words),), "set": (2, 1)}[form]
        tokens = torch.randn(*shape, count, clip.geometry.text_width, generator=draw).requires_grad_(learned)
        plan.append(TokenOp(layer, mode, tokens, start))
    assert_exact(clip, choice, ids, changed(plan, clip.text, adapted, replaced, read=False), text=True)


@pytest.mark.parametrize("choice", ["optimized", "chunked"])
def test_training_computes_text_states_below_the_first_change_once(models, choice):
    """Later steps, with other learned values, still give the features and gradients of the reference."""
    clip, draw = models["quickgelu"], seeded(2)
    prompts = prompt_packing.PromptSet(clip.tokenize([f"a photo of a {word}." for word in WORDS]))
    calls: list[object] = []
    handle = clip.text.transformer.resblocks[0].register_forward_hook(lambda *call: calls.append(call))
    first_calls = 0
    for step in range(3):
        tokens = torch.randn(2, clip.geometry.text_width, generator=draw).requires_grad_()
        plan = changed([TokenOp(1, "insert", tokens, 1)], clip.text, {2}, set(), read=False)
        with chosen(clip, choice) as model:
            fast = model.encode_text(prompts, plan)
        first_calls = first_calls if step else len(calls)
        plain = reference.PlainCLIP(clip).encode_text(prompts.ids, plan)
        learned = [tokens, *plan.adapters[2].parameters()]
        for ours, truth in zip([fast, *gradients(fast, learned)], [plain, *gradients(plain, learned)], strict=True):
            assert_near(ours, truth, choice)
    handle.remove()
    assert 0 < first_calls == len(calls)


def test_blocks_below_the_first_change_are_computed_once_for_frozen_features(models):
    clip, draw = models["quickgelu"], seeded(2)
    images, calls = torch.randn(2, 3, 24, 24, generator=draw), list[int]()
    tokens = torch.randn(2, clip.geometry.vision_width, generator=draw).requires_grad_()
    plan, blocks = Plan((TokenOp(1, "insert", tokens, 1),), read_op=0), clip.visual.transformer.resblocks
    handles = [block.register_forward_hook(lambda *_, i=i: calls.append(i)) for i, block in enumerate(blocks)]
    features, rows, frozen = clip.encode_image_with_frozen(images, plan)
    for handle in handles:
        handle.remove()
    assert sorted(calls) == [0, 1, 1, 2, 2]
    assert torch.equal(frozen, clip.encode_image(images))
    for ours, alone in zip((features, rows), clip.encode_image_rows(images, plan), strict=True):
        assert torch.equal(ours, alone)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_vision_tower_is_exact_under_any_plan(models, data):
    name = data.draw(st.sampled_from(list(GEOMETRIES)))
    clip, draw = models[name], seeded(3)
    g, length, plan = clip.geometry, clip.visual.num_tokens, []
    for layer in sorted(data.draw(st.lists(st.integers(INPUT, g.vision_layers - 1), max_size=4))):
        mode = data.draw(st.sampled_from(["replace", "insert", "append"]))
        count, shape = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([(), (2,)]))
        start = data.draw(st.integers(1, length - count) if mode == "replace" else st.integers(0, length))
        tokens = torch.randn(*shape, count, g.vision_width, generator=draw)
        plan.append(TokenOp(layer, mode, tokens.requires_grad_(data.draw(st.booleans())), start))
        length += 0 if mode == "replace" else count
    images = torch.randn(2, 3, g.image_size, g.image_size, generator=draw)
    adapted = data.draw(st.sets(st.integers(0, g.vision_layers - 1), max_size=2))
    replaced = data.draw(replaceable(g.vision_layers, ("ln_pre.bias", "ln_pre.weight", "ln_post.bias", "proj")))
    changes = changed(plan, clip.visual, adapted, replaced, read=data.draw(st.booleans()))
    assert_exact(clip, data.draw(st.sampled_from(CHOICES[:2])), images, changes, text=False)


def test_features_without_a_plan_next_to_those_of_a_plan(models):
    """Another `ln_pre` changes every block, also those below the first that has tokens."""
    clip = models["quickgelu"]
    images = torch.randn(2, 3, clip.geometry.image_size, clip.geometry.image_size, generator=seeded(3))
    tokens = TokenOp(1, "insert", torch.ones(2, clip.geometry.vision_width), 1)
    plan = changed([tokens], clip.visual, (), {"ln_pre.weight"}, read=True)
    assert_near(clip.encode_image_with_frozen(images, plan)[2], clip.encode_image(images), "frozen")


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("zeroshot", {}),
    ("coop", {}),
    ("cocoop", {}),
    ("maple", {}),
    ("kgcoop", {}),
    ("vpt", {}),
    ("ivlp", {"vision_depth": 3}),
    ("promptsrc", {}),
    ("coprompt", {"sentences": "templates", "depth": 3}),
    ("tcp", {}),
    ("mma", {"scale": 0.5}),
    ("mmrl", {"width": 16}),
    ("skipt", {}),
    ("2sfs", {"first_stage": 0.0}),
    ("mmlop", {}),
    ("gallop", {}),
    ("plotpp", {"vision_prompts": 2}),
    ("procap", {"zero_output": False}),
    ("procap", {"zero_output": False, "n_ctx": 2}),
    ("procap", {"zero_output": False, "class_prompt": "maple"}),
    ("procap", {"zero_output": False, "inject": "final"}),
    ("procap", {"zero_output": False, "inject": "final", "depth": 3}),
    ("procap", {"zero_output": False, "deep_tokens": "independent", "class_prompt": "template", "n_ctx": 2}),
]


def short_method(name: str, clip: CLIP, space: LabelSpace, options: dict[str, Any]) -> Any:
    return methods.build_method(name, clip, space, SHORT_OPTIONS.get(name, {}) | options, seeded(1))


def training(method: Any, size: int) -> tuple[Tensor, list[Tensor]]:
    images, labels = torch.randn(3, 3, size, size, generator=seeded(2)), torch.arange(3) * 4 % 6
    total = torch.stack(list(method.loss(images, labels, method.draw(seeded(5))).values())).sum()
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(total, parameters, allow_unused=True) if parameters else []
    return total, [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


@pytest.mark.parametrize("name, options", METHODS)
def test_every_method_trains_and_classifies_as_the_reference(short_clip, tiny_space, name, options):
    method = short_method(name, short_clip, tiny_space, options)
    method.begin_stage(bool(options.get("first_stage") == 0.0))
    plain_loss, plain_grads = training(reference.with_plain_encoders(method), 32)
    images = torch.randn(2, 3, 32, 32, generator=seeded(8))
    logits = reference.with_plain_encoders(method).classifier()(images)
    for choice in CHOICES:
        with chosen(short_clip, choice) as clip:
            over = method.with_clip(clip)
            loss, grads = training(over, 32)
            found = over.classifier()(images)
        assert_near(loss.detach(), plain_loss.detach(), choice)
        scale = max((float(g.abs().max()) for g in plain_grads), default=1.0)
        for ours, truth in zip(grads, plain_grads, strict=True):
            assert (ours - truth).abs().max() <= TOLERANCE * scale, choice
        assert (found - logits).abs().max() <= TOLERANCE * logits.abs().max(), choice


class Work(TorchDispatchMode):
    """Counts floating-point operations of matrix products, and notes every operation that was run."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.add(str(func._overloadpacket))
        count = flop_registry.get(func._overloadpacket)
        if count is not None and "attention" not in str(func):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


@pytest.fixture(scope="module")
def counted() -> tuple[CLIP, Tensor, tuple[int, ...]]:
    """A text tower of 3 blocks, width 32; ids of six prompts with 3 shared leading columns, and their lengths."""
    clip = CLIP.random(Geometry(32, 8, 64, 3, 1, 32, 3, 1, 77, 49408, 16, quick_gelu=True), seed=0)
    ids = clip.tokenize([f"X X {word}." for word in ("cat", "red circle", "a b c d e", "dog", "x y", "horse cow")])
    return clip, ids, prompt_packing.PromptSet(ids).lengths


def text_work(clip: CLIP, ids: Tensor) -> int:
    """Forward operations, in units of one row through one D x D matrix; the projection left out."""
    width, joint = clip.geometry.text_width, clip.geometry.embed_dim
    prompts = prompt_packing.PromptSet(ids)
    with Work() as forward:
        clip.encode_text(prompts, Plan((TokenOp(INPUT, "replace", torch.zeros(2, width), 1),)))
    units, rest = divmod(forward.flops - 2 * len(ids) * width * joint, 2 * width * width)
    assert not rest
    return units


def test_the_text_tower_computes_shared_rows_once_and_no_padding(counted):
    """A row costs 12 units a block: 3 for queries, keys and values, 1 for the output, 8 for the MLP."""
    clip, ids, lengths = counted
    count, shared = len(lengths), 3
    assert text_work(clip.without_optimizations(), ids) == 36 * 77 * count
    # This many rows are one group, so that none is filled up. The last block computes keys and values of every row, the
    # rest of the end rows alone.
    packed = shared + sum(lengths) - shared * count
    assert text_work(clip, ids) == 24 * packed + 2 * packed + 10 * count


def tensor_bytes() -> int:
    """The bytes of all tensors but those that `gc.freeze` has put aside."""
    gc.collect()
    return sum(found.nbytes for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter))


@pytest.mark.parametrize("name", ["mma", "mmrl", "skipt"])
def test_text_below_what_is_learned_is_computed_once_and_no_image_is_stored(short_clip, tiny_space, name):
    """The memory of a training does not grow with its images; SkipT's public code stores states of all of them."""
    method, labels = short_method(name, short_clip, tiny_space, {"first_block": 2}), torch.tensor([0, 4, 2])
    ran, held = [], []
    blocks = short_clip.text.transformer.resblocks
    hooks = [block.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(blocks)]
    # Looking through all objects of the test process would take seconds.
    gc.freeze()
    for step in range(4):
        ran.clear()
        sum(method.loss(torch.randn(3, 3, 32, 32, generator=seeded(step)), labels, ()).values()).backward()
        method.zero_grad(set_to_none=True)
        assert {*ran} == {*range(2 if step else 0, len(blocks))}
        held.append(tensor_bytes())
    gc.unfreeze()
    for hook in hooks:
        hook.remove()
    assert held[0] > 0 and held[1:] == held[:1] * 3


@pytest.mark.parametrize("learned", [False, True])
def test_the_vision_tower_computes_what_is_read(counted, learned):
    clip, _, _ = counted
    rows, batch, width, depth = clip.visual.num_tokens + 2, 5, 64, 3
    plan = Plan((TokenOp(INPUT, "append", torch.zeros(2, width, requires_grad=learned)),))
    images, operations = torch.zeros(batch, 3, 32, 32), {}
    for choice, model in {"plain": clip.without_optimizations(), "optimized": clip}.items():
        with Work() as forward:
            features = model.encode_image(images, plan)
        with Work() as backward:
            if learned:
                features.sum().backward()
        operations[choice] = forward.flops, backward.flops
    unit = 2 * width * width
    spared = 10 * unit * batch * (rows - 1)
    assert operations["plain"][0] - operations["optimized"][0] == spared
    if learned:
        assert operations["plain"][1] - operations["optimized"][1] == spared
        # The patches' embedding is never differentiated: what is left is the blocks and the projection.
        assert operations["plain"][1] == 12 * depth * unit * batch * rows + 2 * batch * width * 16


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 24)])
def test_the_mlp_is_its_three_layers(quick, shape):
    draw = seeded(2)
    mlp = attention.MLP(24, 50, quick).requires_grad_(False).double()
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw))
    x = torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
    ours, plain = mlp.folded(x), mlp(x)
    assert torch.allclose(ours, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(ours, [x]), gradients(plain, [x]), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_chunks_bound_what_is_kept_for_the_backward_pass(models):
    """State kept for the backward pass grows with the rows in the tower at once, not with the number of classes."""
    clip = models["quickgelu"]
    ids = clip.tokenize([f"X X {WORDS[i % 7]} {WORDS[i % 5]}." for i in range(120)])
    kept = {}
    for rows in (towers.CHUNK_ROWS, 64):
        tokens, total = torch.zeros(2, 64, requires_grad=True), [0]

        def note(x: Tensor, total: list[int] = total) -> Tensor:
            total[0] += x.numel() * x.element_size()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
        with patch.object(towers, "CHUNK_ROWS", rows), hooks:
            clip.encode_text(ids, Plan((TokenOp(INPUT, "replace", tokens, 1),)))
        kept[rows] = total[0]
    assert kept[64] < kept[towers.CHUNK_ROWS] / 20


IMAGENET_STEP = """
import resource, torch
from procap.clip import CLIP
from procap.geometry import Geometry
from procap.methods import build_method
from procap.text import LabelSpace
torch.set_num_threads(2)
clip = CLIP.random(Geometry(224, 16, 768, 12, 12, 512, 12, 8, 77, 49408, 512, quick_gelu=True))
space = LabelSpace(tuple(("red " * (i % 5) + f"cat {i % 10}") for i in range(1000)))
method = build_method("procap", clip, space, {}, torch.Generator().manual_seed(0))
terms = method.loss(torch.zeros(32, 3, 224, 224), torch.arange(32), method.draw(torch.Generator().manual_seed(1)))
sum(terms.values()).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_all_of_imagenet_trains_within_eight_gigabytes():
    """One whole step of ProCAP at ViT-B/16 in float32: 1,000 classes, 32 images, peak resident memory."""
    done = subprocess.run([sys.executable, "-c", IMAGENET_STEP], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 8e9


class HostWaits(TorchDispatchMode):
    """Refuses what makes the host wait for a device: asking it for a number, and copying one to it (`torch.tensor`)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._overloadpacket)
        waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "lift_fresh")
        assert name.removeprefix("aten.") not in waits, name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name, options", METHODS[1:])
@pytest.mark.parametrize("choice", mark_slow(CHOICES[:3], ("optimized",)))
def test_no_step_waits_for_the_device(short_clip, tiny_space, name, options, choice):
    method = short_method(name, short_clip, tiny_space, options)
    with chosen(short_clip, choice) as clip:
        method = method.with_clip(clip)
        training(method, 32)
        with HostWaits():
            training(method, 32)


def test_prompts_laid_out_in_inference_train_afterwards(tiny_clip):
    prompts, tokens = prompt_packing.PromptSet(tiny_clip.tokenize(["X X cat.", "X X red circle."])), torch.zeros(2, 64)
    plan = Plan((TokenOp(INPUT, "replace", tokens.requires_grad_(), 1),))
    with torch.inference_mode():
        tiny_clip.encode_text(prompts, plan)
    tiny_clip.encode_text(prompts, plan).sum().backward()
    assert tokens.grad is not None and tokens.grad.abs().max() > 0


def test_prompts_beyond_the_context_are_refused_under_every_choice(models):
    clip = models["one-layer"]
    ids = clip.tokenize(["cat", "word " * 20])
    fits, too_long = (Plan((TokenOp(INPUT, "insert", torch.zeros(count, 32), 1),)) for count in (10, 11))
    for choice in CHOICES:
        with chosen(clip, choice) as model:
            assert model.encode_text(ids, fits).shape == (2, 16)
            with pytest.raises(errors.UserError, match="a prompt needs 33 tokens, CLIP reads 32"):
                model.encode_text(ids, too_long)
