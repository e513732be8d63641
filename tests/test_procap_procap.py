"""ProCAP equals its definition: Gaussian tokens, cross-attention, slots, losses, every ablation."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import embed_words, normed, perturb, pictures, seeded

from procap.compiled import compiled_level
from procap.errors import UsageError
from procap.losses import info_nce, kl_to_standard_normal, l2
from procap.methods import build_method
from procap.methods.procap import ProCAP
from procap.reference import encode_image, encode_text
from procap.text import LabelSpace
from runner.step_schedule import StepSchedule


def build(clip, space, seed=0, **options):
    return build_method("procap", clip, space, options, seeded(seed))


def trained(clip, space, **options):
    """ProCAP away from its start: every parameter moved, log-variances on both sides of the clamp."""
    return perturb(build(clip, space, **options))


@pytest.fixture
def space(tiny_space):
    return tiny_space


def test_text_tokens_start_at_the_templates_first_words(tiny_clip):
    space = LabelSpace(("cat", "dog"), templates=("a centered satellite photo of a {}",))
    method = build(tiny_clip, space)
    assert torch.equal(method.text_mu[0], embed_words(tiny_clip, "a centered satellite photo"))
    assert method.vision_mu.shape == (1, 4, 128)
    assert method.vision_mu.std().item() == pytest.approx(0.02, rel=0.15)
    assert (method.text_logvar == -9).all() and (method.vision_logvar == -9).all()


def test_several_templates_start_at_their_mean(tiny_clip):
    given = LabelSpace(("cat", "dog"), templates=("a photo of a {}", "some close up picture of {}"))
    expected = (embed_words(tiny_clip, "a photo of a") + embed_words(tiny_clip, "some close up picture")) / 2
    torch.testing.assert_close(build(tiny_clip, given).text_mu[0].detach(), expected)
    first = build(tiny_clip, given, template_init_combine="first")
    assert torch.equal(first.text_mu[0], embed_words(tiny_clip, "a photo of a"))


def test_training_samples_and_inference_takes_the_means(tiny_clip, space):
    method = build(tiny_clip, space)
    with torch.no_grad():
        method.text_logvar[0, 0], method.text_logvar[0, 1], method.text_logvar[0, 2] = -2, -40, 9
    noise = seeded(0)
    draws = torch.stack([method.tokens(method.draw(noise))[1][0].detach() for _ in range(800)])
    spread = (draws - method.text_mu[0].detach()).square().mean(dim=(0, 2)).sqrt()
    expected = [math.exp(-1), math.exp(-6), math.exp(1), math.exp(-4.5)]
    assert spread.tolist() == pytest.approx(expected, rel=0.03)
    vision, text = method.tokens(None)
    assert torch.equal(vision, method.vision_mu) and torch.equal(text, method.text_mu)


@pytest.mark.parametrize("changes", [{}, {"warmup": "constant"}, {"schedule": "step", "min_lr": 1e-4}])
def test_log_variances_with_factor_0_have_no_rate_in_any_step(tiny_clip, space, changes):
    recipe = ProCAP.recipe().model_copy(update=changes)
    schedule = StepSchedule(recipe, SimpleNamespace(steps_per_pass=3), build(tiny_clip, space, logvar_lr_scale=0.0))
    rates = [schedule.rates(step, step // 3) for step in range(schedule.total)]
    assert all(of_others > 0 and of_logvars == 0 for of_others, of_logvars in rates)


def test_statistics_say_how_far_sigma_moved(tiny_clip, space):
    method = build(tiny_clip, space, logvar_init=-4.0)
    with torch.no_grad():
        method.text_logvar += 2 * math.log(1.5)
        method.text_logvar[0, 0, 0] = -4 + 2 * math.log(3)
    found = method.statistics()
    assert found["sigma of vision"] == pytest.approx(
        {"median": math.exp(-2), "min": math.exp(-2), "max": math.exp(-2), "moved_median": 0, "moved_max": 0}, abs=1e-6
    )
    assert found["sigma of text"]["median"] == pytest.approx(1.5 * math.exp(-2))
    assert (found["sigma of text"]["moved_median"], found["sigma of text"]["moved_max"]) == pytest.approx((0.5, 2))
    levels = build(tiny_clip, space, depth=3, deep_tokens="independent").statistics()
    sigmas = [f"sigma of {tokens} level {level}" for tokens in ("vision", "text") for level in (1, 2, 3)]
    assert [name for name in levels if name.startswith("sigma")] == sigmas
    assert not any(name.startswith("sigma") for name in build(tiny_clip, space, gaussian=False).statistics())


def test_statistics_compare_refined_tokens_with_their_means(tiny_clip, space):
    """Refinement changes nothing at first; afterwards every level has its own norm."""
    method = build(tiny_clip, space, depth=3)
    tokens = method.statistics()["tokens of text"]
    assert tokens["level 1"] == tokens["level 3"] == pytest.approx(tokens["means"])
    with torch.no_grad():
        method.text_attention[2].output.weight.normal_(generator=seeded(0))
    moved = method.statistics()["tokens of text"]
    assert moved["level 2"] == pytest.approx(moved["means"]) and moved["level 3"] > 2 * moved["means"]
    assert method.statistics()["tau_p"] == {"value": pytest.approx(0.07)}


def test_the_letter_of_the_paper_is_one_option_that_stands_for_five(tiny_clip, space):
    options = ProCAP.Options(reading="letter", norm="none")
    changed = {name: value for name, value in options.model_dump().items() if value != getattr(ProCAP.Options(), name)}
    assert changed == {
        "class_prompt": "template", "norm": "none", "inject": "final", "shared_attention": True,
        "learn_logit_scale": True,
    }  # fmt: skip
    assert ProCAP.Options(**options.model_dump()).model_dump() == options.model_dump(), "a configuration has the five"


def attention_by_hand(module, x, y):
    """Pre-norm multi-head attention, one head and one query at a time."""

    def norm(x, layer):
        return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias)

    x, y = norm(x, module.norm_query), norm(y, module.norm_other)
    q, k, v = module.query(x), y @ module.key.weight.T, module.value(y)
    width = q.shape[-1] // module.heads
    rows = []
    for i in range(len(q)):
        heads = []
        for h in range(module.heads):
            part = slice(h * width, (h + 1) * width)
            weights = torch.softmax(torch.stack([q[i, part] @ key[part] for key in k]) / math.sqrt(width), dim=0)
            heads.append(sum(w * value[part] for w, value in zip(weights, v, strict=True)))
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ module.output.weight.T + module.output.bias


def stack_by_hand(method, v, t):
    """Algorithm 1: both updates of a level read the level below, W_p is one for all levels."""
    vision, text = [v], [t]
    for level in range(method.options.depth):
        below_v, below_t = vision[-1], text[-1]
        projected = below_v @ method.vision_to_text.weight.T + method.vision_to_text.bias
        vision.append(below_v + attention_by_hand(method.vision_attention[level], below_v, below_t))
        text.append(below_t + attention_by_hand(method.text_attention[level], below_t, projected))
    return vision[1:], text[1:]


def test_levels_are_those_of_the_algorithm(tiny_clip, space):
    method = trained(tiny_clip, space, depth=4, heads=3, head_width=16)
    vision, text = method.refine(*method.tokens(None))
    expected = stack_by_hand(method, method.vision_mu[0], method.text_mu[0])
    assert len(vision) == len(text) == 4
    for got, want in (*zip(vision, expected[0], strict=True), *zip(text, expected[1], strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(vision[0], vision[1], atol=1e-3)


def refined_with_gradients(method):
    """Tokens of all levels, and the gradients of all that the refinement has learned."""
    levels = [rows for modality in method.refine(*method.tokens(None)) for rows in modality]
    parameters = [
        p for name, p in method.named_parameters() if name.endswith("_mu") or "to_text" in name or "_att" in name
    ]
    loss = sum((rows * torch.linspace(-1, 1, rows.numel(), device=rows.device).view_as(rows)).sum() for rows in levels)
    return [*levels, *torch.autograd.grad(loss, parameters)]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("aot_eager", "cpu"),
        pytest.param("inductor", "cpu", marks=pytest.mark.slow),
        pytest.param("inductor", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_compiled_levels_give_the_tokens_and_gradients_of_eager_ones(
    tiny_clip, space, norm, backend, device, monkeypatch
):
    """One compiled program serves all levels; `aot_eager` is the tracing of torch.compile with torch's own kernels."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr("procap.methods.procap.compiled_level", lambda: compiled_level(backend))
    outcomes = []
    for fused in (False, True):
        clip = copy.deepcopy(tiny_clip).to(device)
        clip.fused_kernels = fused
        outcomes.append(refined_with_gradients(trained(clip, space, depth=4, norm=norm)))
    for eager, compiled in zip(*outcomes, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_independent_levels_are_refined_once_each(tiny_clip, space):
    method = trained(tiny_clip, space, depth=3, deep_tokens="independent")
    assert method.text_mu.shape == (3, 4, 64) and method.vision_logvar.shape == (3, 4, 128)
    vision, _ = method.refine(*method.tokens(None))
    for level in range(3):
        own, other = method.vision_mu[level], method.text_mu[level]
        want = own + attention_by_hand(method.vision_attention[level], own, other)
        torch.testing.assert_close(vision[level], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("deep_tokens", ["refined", "independent"])
def test_one_attention_block_can_serve_all_levels(tiny_clip, space, deep_tokens):
    """The same as separate blocks with equal weights."""
    shared = trained(tiny_clip, space, depth=3, deep_tokens=deep_tokens, shared_attention=True)
    separate = build(tiny_clip, space, depth=3, deep_tokens=deep_tokens)
    block = re.compile(r"(attention)\.\d+\.")
    state = {name: shared.state_dict()[block.sub(r"\1.0.", name)] for name in separate.state_dict()}
    separate.load_state_dict(state)
    tokens = shared.tokens(None)
    for one, other in zip(shared.refine(*tokens), separate.refine(*tokens), strict=True):
        assert all(map(torch.equal, one, other))
    assert {name.split(".")[1] for name, _ in shared.named_parameters() if "attention" in name} == {"0"}


def test_training_starts_at_the_template(tiny_clip, space):
    """With output projections at zero every level is its start, V_l = V_0 and T_l = T_0, samples included."""
    method = build(tiny_clip, space)
    for noise in (None, 4):
        start = method.tokens(None if noise is None else method.draw(seeded(noise)))
        for tokens, levels in zip(start, method.refine(*start), strict=True):
            assert len(levels) == 9 and all(torch.equal(level, tokens[0]) for level in levels)
    other = build(tiny_clip, space, zero_output=False)
    assert not torch.equal(other.refine(*other.tokens(None))[0][0], other.vision_mu[0])


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_norm_reading_places_the_layer_norms(tiny_clip, space, norm):
    method = trained(tiny_clip, space, norm=norm, depth=2)
    block, x, y = method.vision_attention[0], method.vision_mu[0], method.text_mu[0]
    inner = block.attend(block.norm_query(x), block.norm_other(y)) if norm == "pre" else block.attend(x, y)
    expected = block.norm_output(x + inner) if norm == "post" else x + inner
    torch.testing.assert_close(block(x, y), expected)
    norms = [name for name, _ in method.named_parameters() if "norm" in name]
    assert len(norms) == {"pre": 16, "post": 8, "none": 0}[norm]


def test_layer_i_gets_level_i_plus_one(tiny_clip, space):
    """The input of both towers gets level 1 and block i level i + 1, in the rows that MaPLe uses."""
    method = trained(tiny_clip, space, depth=5)
    vision, text = method.refine(*method.tokens(None))
    image_plan, text_plan = method.plans(None)
    assert [op.layer for op in image_plan.tokens] == [op.layer for op in text_plan.tokens] == [-1, 1, 2, 3, 4]
    assert [(op.mode, op.start) for op in text_plan.tokens] == [("replace", 1)] * 5
    assert image_plan.tokens[0].mode == "append"
    assert [(op.mode, op.start) for op in image_plan.tokens[1:]] == [("replace", tiny_clip.visual.num_tokens)] * 4
    for plan, levels in ((image_plan, vision), (text_plan, text)):
        assert all(torch.equal(op.tokens, tokens) for op, tokens in zip(plan.tokens, levels, strict=True))


def test_the_last_level_enters_at_the_input(tiny_clip, space):
    """V_D and T_D of Algorithm 1, after all five levels of refinement."""
    method = trained(tiny_clip, space, depth=5, inject="final")
    vision, text = method.refine(*method.tokens(None))
    for plan, levels in zip(method.plans(None), (vision, text), strict=True):
        assert [op.layer for op in plan.tokens] == [-1]
        assert all(torch.equal(op.tokens, levels[-1]) for op in plan.tokens)


def test_the_last_level_of_independent_sets_is_refused(tiny_clip, space):
    """It would leave the tokens of all other levels without a use."""
    with pytest.raises(UsageError, match="each level has its own: give inject = levels or deep_tokens = refined"):
        build(tiny_clip, space, inject="final", deep_tokens="independent")


SATELLITE = ("a centered satellite photo of a {}", "a satellite image of a {}")
FLOWER = ("a photo of a {} flower", "a close-up photo of a {} flower")
VIDEO = ("a video of a person doing {}",)


def read_behind_tokens(clip, texts, n_ctx=4):
    """Token ids of class prompts behind the rows of the learned tokens, given what follows those."""
    free = " ".join(["X"] * n_ctx)
    return clip.tokenize([f"{free} {text}" for text in texts])[:, 1 + n_ctx :]


@pytest.mark.parametrize("templates, n_ctx, class_prompt, expected", [
    (SATELLITE, 4, "phrase", "of a red circle."),
    (SATELLITE, 2, "phrase", "satellite photo of a red circle."),
    (SATELLITE, 8, "phrase", "red circle."),
    (VIDEO, 4, "phrase", "person doing red circle."),
    (FLOWER, 4, "phrase", "red circle flower."),
    (FLOWER[1:], 2, "phrase", "- up photo of a red circle flower."),
    (("{} texture",), 4, "phrase", "red circle texture."),
    (("the word{}",), 1, "phrase", "word red circle."),
    (SATELLITE, 4, "maple", "red circle."),
    (FLOWER, 2, "maple", "red circle flower."),
    (FLOWER, 4, "template", "a photo of a red circle flower."),
])  # fmt: skip
def test_class_prompt_readings(tiny_clip, templates, n_ctx, class_prompt, expected):
    """Learned tokens come first; words of the template stay behind them, or are dropped."""
    space = LabelSpace(("red_circle",), templates=templates)
    method = build(tiny_clip, space, class_prompt=class_prompt, n_ctx=n_ctx)
    ids = method.class_prompts(space).ids
    assert torch.equal(ids[:, 1 + n_ctx :], read_behind_tokens(tiny_clip, [expected], n_ctx))


def test_phrase_is_the_default_and_starts_at_the_template(tiny_clip):
    """Before training the input of the text tower is the template with the class name in it."""
    space = LabelSpace(("cat", "dog"), templates=SATELLITE[:1])
    method = build(tiny_clip, space)
    template = tiny_clip.tokenize([f"a centered satellite photo of a {name}." for name in space.names()])
    assert torch.equal(method.class_prompts(space).ids, template)
    _, plan = build(tiny_clip, space, depth=1).plans(method.prompts)
    plain, prompted = encode_text(tiny_clip, template), encode_text(tiny_clip, method.prompts.ids, plan)
    torch.testing.assert_close(prompted, plain)


@pytest.mark.parametrize("options, expected", [
    ({}, "of a cat flower."),
    ({"class_prompt": "maple"}, "cat flower."),
    ({"class_prompt": "template"}, "a video of a person doing cat flower."),
])  # fmt: skip
def test_words_of_the_class_prompts_on_another_data_set(tiny_clip, options, expected):
    own = LabelSpace(("river",), templates=("a centered satellite photo of a {} from space",), dataset="tiles")
    novel = LabelSpace(("forest",), templates=own.templates, dataset="tiles")
    other = LabelSpace(("cat",), templates=("a video of a person doing {} flower",), dataset="petals")
    method = build(tiny_clip, own, **options)
    assert torch.equal(method.class_prompts(other).ids[:, 5:], read_behind_tokens(tiny_clip, [expected]))
    for space in (own, novel):
        unchanged = build(tiny_clip, space, **options)
        assert torch.equal(method.class_prompts(space).ids, unchanged.class_prompts(space).ids)


def test_a_learned_temperature_is_used_in_training_and_test(tiny_clip, space):
    method, frozen = build(tiny_clip, space, learn_logit_scale=True), build(tiny_clip, space)
    torch.testing.assert_close(method.classifier()(pictures()), frozen.classifier()(pictures()))
    with torch.no_grad():
        method.logit_scale += math.log(0.5)
    torch.testing.assert_close(2 * method.classifier()(pictures()), frozen.classifier()(pictures()))
    cool, plain = (one.loss(pictures(), torch.tensor([0, 1, 2]), one.draw(seeded()))["ce"] for one in (method, frozen))
    assert not torch.isclose(cool, plain)


def test_terms_are_the_papers_sum(tiny_clip, space):
    """Every term recomputed from the sampled tokens with the plain encoders, weights included."""
    method = trained(tiny_clip, space, kl_weight=0.03, l2_weight=0.02, nce_weight=0.5)
    images, labels = pictures(4), torch.tensor([0, 2, 2, 1])
    got = method.loss(images, labels, method.draw(seeded(5)))
    with torch.no_grad():
        noise = seeded(5)
        v, t = (
            mu + torch.exp(logvar / 2) * torch.randn(mu.shape, generator=noise)
            for mu, logvar in ((method.vision_mu, method.vision_logvar), (method.text_mu, method.text_logvar))
        )
        image_plan, text_plan = method.plans(None)
        vision, text = stack_by_hand(method, v[0], t[0])
        image = encode_image(tiny_clip, images, image_plan.with_tokens(vision))
        classes = encode_text(tiny_clip, method.class_prompts(space).ids, text_plan.with_tokens(text))
        ce = F.cross_entropy(tiny_clip.logit_scale.exp() * normed(image) @ normed(classes).T, labels)
        z, c = normed(method.image_head(image)), normed(method.text_head(classes))
        gaussians = [
            torch.distributions.kl_divergence(
                torch.distributions.Normal(mu, torch.exp(logvar / 2)), torch.distributions.Normal(0.0, 1.0)
            ).sum()
            for mu, logvar in ((method.vision_mu, method.vision_logvar), (method.text_mu, method.text_logvar))
        ]
        means = method.vision_mu.square().sum() + method.text_mu.square().sum()
        expected = {
            "ce": ce,
            "nce": 0.5 * info_nce(z, c, labels, method.log_temperature),
            "kl": 0.03 * sum(gaussians),
            "l2": 0.02 * means,
        }
    assert list(got) == list(expected)
    for name, term in expected.items():
        assert got[name].item() == pytest.approx(term.item(), rel=2e-4), name


def test_default_weights_and_temperature_are_the_papers(tiny_clip, space):
    method = build(tiny_clip, space)
    o = method.options
    assert (o.nce_weight, o.kl_weight, o.l2_weight, o.nce_width) == (0.01, 1e-5, 1e-6, 256)
    assert method.log_temperature.exp().item() == pytest.approx(0.07)
    head = method.image_head
    assert [tuple(layer.weight.shape) for layer in (head[0], head[2])] == [(48, 48), (256, 48)]


ABLATIONS = {
    "cross_attention": ({"vision_to_text", "vision_attention", "text_attention"}, set()),
    "gaussian": ({"vision_logvar", "text_logvar"}, {"kl"}),
    "kl": (set(), {"kl"}),
    "l2": (set(), {"l2"}),
    "infonce": ({"image_head", "text_head", "log_temperature"}, {"nce"}),
}


@pytest.mark.parametrize("switch", ABLATIONS)
def test_a_switch_removes_its_parameters_and_terms_and_moves_nothing_else(tiny_clip, space, switch):
    parameters, terms = ABLATIONS[switch]
    full, less = build(tiny_clip, space), build(tiny_clip, space, **{switch: False})
    whole, rest = full.state_dict(), less.state_dict()
    assert {name.split(".")[0] for name in set(whole) - set(rest)} == parameters
    assert set(rest) <= set(whole) and all(torch.equal(whole[name], tensor) for name, tensor in rest.items())
    labels = torch.tensor([0, 1, 2])
    lost, kept = full.loss(pictures(), labels, full.draw(seeded())), less.loss(pictures(), labels, less.draw(seeded()))
    assert set(lost) - set(kept) == terms
    if switch not in ("gaussian", "cross_attention"):
        assert all(torch.equal(lost[name], term) for name, term in kept.items())


def case(seed, batch, classes, width=6, temperature=0.07):
    g = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(batch, width, generator=g), dim=-1)
    text = F.normalize(torch.randn(classes, width, generator=g), dim=-1)
    labels = torch.randint(classes, (batch,), generator=g)
    return image, text, labels, torch.tensor(math.log(temperature))


def by_hand(image, text, labels, log_temperature):
    """The definition, one sum at a time, in double precision."""
    z, c, tau = image.double(), text.double(), math.exp(log_temperature)
    term = [[math.exp(float(zi @ ck) / tau) for ck in c] for zi in z]
    images, classes = range(len(z)), range(len(c))
    image_to_class = [-math.log(term[i][int(labels[i])] / sum(term[i][k] for k in classes)) for i in images]
    class_to_image = []
    for k in classes:
        own = [i for i in images if int(labels[i]) == k]
        if own:
            class_to_image.append(-math.log(sum(term[i][k] for i in own) / sum(term[i][k] for i in images)))
    return (sum(image_to_class) / len(image_to_class) + sum(class_to_image) / len(class_to_image)) / 2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), batch=st.integers(1, 9), classes=st.integers(1, 12),
    temperature=st.sampled_from([0.07, 0.2, 1.0]),
)  # fmt: skip
def test_info_nce_is_the_double_loop(seed, batch, classes, temperature):
    image, text, labels, log_temperature = case(seed, batch, classes, temperature=temperature)
    loss = info_nce(image, text, labels, log_temperature)
    assert loss.item() == pytest.approx(by_hand(image, text, labels, log_temperature), rel=2e-5, abs=2e-6)


def test_absent_classes_count_as_negatives_and_only_there():
    """An absent class changes the image-to-class part alone; its own gradient is finite and comes from that part."""
    image, text, labels, log_temperature = case(5, batch=6, classes=3)
    more = torch.cat([text, F.normalize(torch.randn(2, 6, generator=torch.Generator().manual_seed(1)), dim=-1)])
    more.requires_grad_(True)
    change = info_nce(image, more, labels, log_temperature) - info_nce(image, text, labels, log_temperature)
    expected = F.cross_entropy(image @ more.T / 0.07, labels) - F.cross_entropy(image @ text.T / 0.07, labels)
    torch.testing.assert_close(change, expected / 2)
    (got,) = torch.autograd.grad(info_nce(image, more, labels, log_temperature), more)
    (want,) = torch.autograd.grad(F.cross_entropy(image @ more.T / 0.07, labels) / 2, more)
    assert got.isfinite().all()
    torch.testing.assert_close(got[3:], want[3:])


def test_info_nce_gradients_are_those_of_the_definition():
    """Central differences of the loop, for features and temperature, with classes absent from the batch."""
    image, text, labels, log_temperature = (x.double() if x.is_floating_point() else x for x in case(6, 4, 6))
    leaves = [x.float().requires_grad_(True) for x in (image, text, log_temperature)]
    info_nce(leaves[0], leaves[1], labels, leaves[2]).backward()
    step = 1e-5
    for which, leaf in enumerate(leaves):
        for index in range(0, leaf.numel(), 5):
            ends = []
            for sign in (1, -1):
                moved = [image.clone(), text.clone(), log_temperature.clone()]
                moved[which].view(-1)[index] += sign * step
                ends.append(by_hand(moved[0], moved[1], labels, moved[2]))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert leaf.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-3, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), low=st.floats(-12, 0), high=st.floats(0, 2))
def test_kl_is_that_of_torch_distributions(seed, low, high):
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(2, 4, 5, generator=g)
    logvar = low + (high - low) * torch.rand(2, 4, 5, generator=g)
    normal = torch.distributions.Normal(mu.double(), torch.exp(logvar.double() / 2))
    expected = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum()
    assert kl_to_standard_normal(mu, logvar).item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-4)


def test_l2_is_the_sum_of_squared_token_norms():
    mu = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = sum(float(token.norm()) ** 2 for token in mu.flatten(0, 1))
    assert l2(mu).item() == pytest.approx(expected, rel=1e-5)


def test_losses_stay_in_float32_under_autocast():
    image, text, labels, log_temperature = case(8, batch=7, classes=5)
    plain = info_nce(image, text, labels, log_temperature), kl_to_standard_normal(image, image), l2(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = info_nce(image, text, labels, log_temperature), kl_to_standard_normal(image, image), l2(image)
    assert [x.item() for x in cast] == [x.item() for x in plain]
