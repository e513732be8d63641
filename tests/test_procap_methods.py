"""Each method equals its published definition: parameters, their start, their rows, gradients, options, plug-ins."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plug_ins import METHOD, install
from small_runs import embed_words, mark_slow, normed, pictures, seeded
from tiny_geometry import IMAGE_METHODS, SHORT_GEOMETRY, SHORT_OPTIONS, UNTRAINED

from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.geometry import Geometry
from procap.methods import (
    METHODS,
    build_method,
    describe_method,
    hooks,
    method_class,
    method_options,
    method_source,
    title_and_colour,
)
from procap.methods.method import Method
from procap.methods.zeroshot import ENSEMBLE
from procap.text import LabelSpace

NEEDED = {"coprompt": {"sentences": "templates"}}
TRAINED = tuple(name for name in IMAGE_METHODS if name not in UNTRAINED)


def build(name, clip, space, seed=0, **options):
    return build_method(name, clip, space, NEEDED.get(name, {}) | options, seeded(seed))


@pytest.fixture
def space(tiny_space):
    return tiny_space


@pytest.fixture(scope="module")
def base16():
    """ViT-B/16 with uninitialised weights: sizes are all that is asked of it."""
    geometry = Geometry(224, 16, 768, 12, 12, 512, 12, 8, 77, 49408, 512, quick_gelu=True)
    with torch.device("meta"):
        clip = CLIP(geometry, name="ViT-B-16")
    return clip.to_empty(device="cpu").requires_grad_(False)


@pytest.mark.parametrize("name, options, count", [
    ("zeroshot", {}, 0),
    ("coop", {}, 2_048),
    ("coop", {"n_ctx": 16, "ctx_init": ""}, 8_192),
    ("cocoop", {}, 35_360),
    ("kgcoop", {}, 2_048),
    ("vpt", {}, 73_728),
    ("ivlp", {}, 30_720),
    ("ivlp", {"n_ctx": 4, "vision_tokens": 0, "vision_depth": 0}, 24_576),
    ("promptsrc", {}, 46_080),
    ("promptsrc", {"depth": 3, "vision_depth": 3}, 15_360),
    ("coprompt", {}, 5_014_528),
    ("coprompt", {"n_ctx": 2}, 5_002_240),
    ("coprompt", {"depth": 9}, 3_826_432),
    ("tcp", {}, 331_904),
    ("mma", {}, 674_560),
    ("mmrl", {}, 4_992_256),
    ("mmrl", {"width": 2048}, 18_762_496),
    ("skipt", {}, 62_099_456),
    ("2sfs", {}, 61_440 + 5 * 512),
    ("mmlop", {}, 11_556),
    ("gallop", {}, 606_208),
    ("plotpp", {}, 14_336),
    ("maple", {}, 3_555_072),
    ("maple", {"depth": 3}, 1_185_024),
    ("procap", {}, 22_497_025),
    ("procap", {"deep_tokens": "independent"}, 22_497_025 + 8 * 10_240),
    ("procap", {"learn_logit_scale": True}, 22_497_026),
])  # fmt: skip
def test_trainable_parameters_at_vit_b_16(base16, space, name, options, count):
    assert sum(p.numel() for p in build(name, base16, space, **options).parameters() if p.requires_grad) == count


VARIANTS = [
    ("coop", {}),
    ("cocoop", {}),
    ("kgcoop", {}),
    ("vpt", {"n_ctx": 3, "depth": 5}),
    ("ivlp", {"depth": 3, "vision_tokens": 1}),
    ("promptsrc", {}),
    ("coprompt", {"depth": 3}),
    ("tcp", {}),
    ("mma", {"scale": 0.5}),
    ("mmrl", {"width": 16}),
    ("skipt", {}),
    ("mmlop", {"rank": 2}),
    ("gallop", {}),
    ("plotpp", {"texts": 3}),
    ("maple", {}),
    ("maple", {"fp16_rounding": True, "depth": 12}),
    ("procap", {"zero_output": False}),
    ("procap", {"zero_output": False, "deep_tokens": "independent", "norm": "none", "learn_logit_scale": True}),
    ("procap", {"zero_output": False, "norm": "post", "n_ctx": 2, "depth": 1, "class_prompt": "template"}),
    ("procap", {"cross_attention": False, "gaussian": False, "infonce": False, "l2": False}),
]


@pytest.mark.parametrize("name, options", VARIANTS)
def test_gradient_reaches_every_learnable_and_nothing_else(tiny_clip, space, name, options):
    method = build(name, tiny_clip, space, **options)
    terms = method.loss(pictures(), torch.tensor([0, 1, 1]), method.draw(seeded(2)))
    assert next(iter(terms)) == "ce" and all(term.isfinite() and term.dim() == 0 for term in terms.values())
    sum(terms.values()).backward()
    for parameter, tensor in method.named_parameters():
        assert tensor.grad is not None and tensor.grad.isfinite().all(), parameter
        assert tensor.grad.abs().sum() > 0, parameter
    assert all(p.grad is None and not p.requires_grad for p in tiny_clip.parameters())


@pytest.fixture(scope="module")
def large_clip():
    """Three layers with the widths, heads and patches of ViT-L/14, for small images."""
    sizes = {"vision_width": 1024, "vision_heads": 16, "text_width": 768, "text_heads": 12, "embed_dim": 768}
    return CLIP.random(replace(SHORT_GEOMETRY, image_size=42, patch_size=14, **sizes))


@pytest.mark.parametrize("name", mark_slow(IMAGE_METHODS))
def test_every_method_trains_and_classifies_at_the_widths_of_vit_l_14(large_clip, space, name):
    method = build(name, large_clip, space, **SHORT_OPTIONS.get(name, {}))
    images = torch.randn(2, 3, 42, 42, generator=seeded(1))
    if name in TRAINED:
        views = images[:, None].expand(-1, method.views, -1, -1, -1) if method.views > 1 else images
        loss = sum(method.loss(views, torch.tensor([0, 1]), method.draw(seeded(2))).values())
        loss.backward()
        assert all(p.grad.isfinite().all() for p in method.parameters() if p.grad is not None) and loss.isfinite()
    logits = method.classifier()(images)
    assert logits.shape == (2, len(space.classnames)) and logits.isfinite().all()


@pytest.mark.parametrize("name", TRAINED)
def test_state_holds_the_learnables_and_nothing_else(tiny_clip, space, name):
    method = build(name, tiny_clip, space)
    kept = {"dpc": {"tuned"}, "rebapl": {"samples"}}.get(name, set())
    assert set(method.state_dict()) - kept == {name for name, _ in method.named_parameters()}
    frozen = {p.data_ptr() for p in tiny_clip.parameters()}
    assert not frozen & {t.data_ptr() for t in method.state_dict().values()}


@pytest.mark.parametrize("name", METHODS)
def test_the_start_comes_from_the_given_generator_alone(tiny_clip, space, name):
    torch.manual_seed(5)
    state, first = torch.get_rng_state(), build(name, tiny_clip, space, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again, other = build(name, tiny_clip, space, seed=7), build(name, tiny_clip, space, seed=8)
    for key, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])
    if name in ("cocoop", "maple", "procap"):
        assert any(not torch.equal(t, other.state_dict()[key]) for key, t in first.state_dict().items())


@pytest.mark.parametrize("name", TRAINED)
def test_loss_draws_from_the_noise_generator_alone(short_clip, space, name):
    method, labels = build(name, short_clip, space, **SHORT_OPTIONS.get(name, {})), torch.tensor([0, 1, 2])
    state = torch.get_rng_state()
    first = sum(method.loss(pictures(), labels, method.draw(seeded(3))).values())
    assert torch.equal(torch.get_rng_state(), state)
    assert first == sum(method.loss(pictures(), labels, method.draw(seeded(3))).values())
    assert (first == sum(method.loss(pictures(), labels, method.draw(seeded(4))).values())) == (
        name not in ("procap", "bpl")
    )


@pytest.mark.parametrize("name", TRAINED)
def test_bfloat16_training_stays_near_float32(short_clip, space, name):
    method, labels = build(name, short_clip, space, **SHORT_OPTIONS.get(name, {})), torch.tensor([0, 1, 2])
    method.begin_stage(0)
    plain = sum(method.loss(pictures(), labels, method.draw(seeded())).values()).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = sum(method.loss(pictures(), labels, method.draw(seeded())).values())
    cast.backward()
    assert cast.item() == pytest.approx(plain, abs=0.15)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in method.parameters() if p.requires_grad)


def test_zero_shot_is_clip_with_the_data_sets_template(tiny_clip):
    space = LabelSpace(("cat", "big_dog"), template="a photo of a {}, a type of pet.")
    ids = tiny_clip.tokenize(["a photo of a cat, a type of pet.", "a photo of a big dog, a type of pet."])
    image, text = tiny_clip.encode_image(pictures()), tiny_clip.encode_text(ids)
    expected = tiny_clip.logit_scale.exp() * normed(image) @ normed(text).T
    assert torch.equal(build("zeroshot", tiny_clip, space).classifier()(pictures()), expected)


@pytest.mark.parametrize("dataset, count", [("imagenet", 7), ("imagenet-v2", 8), ("dtd", 8)])
def test_zero_shot_ensemble_averages_unit_features(tiny_clip, dataset, count):
    space = LabelSpace(("cat", "big_dog"), template="{} texture.", dataset=dataset)
    templates = [*ENSEMBLE, "{} texture."][:count]
    banks = [normed(tiny_clip.encode_text(tiny_clip.tokenize(space.prompts(template)))) for template in templates]
    classifier = build("zeroshot", tiny_clip, space, templates="ensemble").classifier()
    torch.testing.assert_close(classifier.class_features, normed(sum(banks) / count), rtol=0, atol=1e-6)


def test_coop_starts_as_zero_shot_with_its_words(tiny_clip, space):
    coop, zeroshot = build("coop", tiny_clip, space), build("zeroshot", tiny_clip, space)
    assert torch.equal(coop.classifier()(pictures()), zeroshot.classifier()(pictures()))
    assert torch.equal(coop.context, embed_words(tiny_clip, "a photo of a"))


def test_fp16_rounding_touches_vision_and_deep_text_only(tiny_clip, space):
    plain, rounded = (build("maple", tiny_clip, space, fp16_rounding=flag) for flag in (False, True))
    exact, half = plain.plans(None), rounded.plans(None)
    assert torch.equal(exact[1].tokens[0].tokens, half[1].tokens[0].tokens)
    for one, other in (
        *zip(exact[0].tokens, half[0].tokens, strict=True),
        *zip(exact[1].tokens[1:], half[1].tokens[1:], strict=True),
    ):
        assert torch.equal(other.tokens, one.tokens.half().float()) and not torch.equal(other.tokens, one.tokens)


@pytest.mark.parametrize("name, options, message", [
    ("mapel", {}, "unknown method 'mapel': did you mean maple"),
    ("maple", {"n_ctx": 0}, "n_ctx = 0: input should be greater than or equal to 1"),
    ("2sfs", {"first_stage": 1.0}, "first_stage = 1.0: input should be less than 1"),
    ("maple", {"depht": 3}, "unknown option of maple 'depht': did you mean depth"),
    ("maple", {"depth": 13}, "depth = 13, but tiny has 12 vision and 12 text blocks: give at most 12"),
    ("mmlop", {"depth": 13}, "depth = 13, but tiny has 12 vision and 12 text blocks: give at most 12"),
    ("vpt", {"depth": 13}, "depth = 13, but tiny has 12 vision and 12 text blocks: give at most 12"),
    ("ivlp", {"depth": 13}, "depth = 13, but tiny has 12 vision and 12 text blocks: give at most 12"),
    ("tcp", {"block": 12}, "block = 12, but tiny has 12 vision and 12 text blocks: give at most 11"),
    ("mma", {"first_block": 12}, "first_block = 12, but tiny has 12 vision and 12 text blocks: give at most 11"),
    ("mmrl", {"first_block": 12}, "first_block = 12, but tiny has 12 vision and 12 text blocks: give at most 11"),
    ("skipt", {"first_block": 12}, "first_block = 12, but tiny has 12 vision and 12 text blocks: give at most 11"),
    ("2sfs", {"first_text_block": 13}, "first_text_block = 13, but tiny has 12 vision and 12 text blocks"),
    ("maple", {"ctx_init": "photo"}, "has 1 tokens, fewer than n_ctx = 2"),
    ("procap", {"depth": 13}, "depth = 13, but tiny has 12 vision and 12 text blocks: give at most 12"),
    ("procap", {"class_prompt": "mapel"}, "should be 'phrase', 'maple' or 'template'"),
    ("procap", {"logvar_init": 3}, "logvar_init = 3.0 is outside its clamp"),
    ("coop", {"n_ctx": 16}, "has 4 words but n_ctx = 16"),
    ("coop", {"ctx_init": "the centrifuges", "n_ctx": 2}, "use words of one token each"),
    ("zeroshot", {"templates": "all"}, "should be 'single' or 'ensemble'"),
])  # fmt: skip
def test_wrong_options_are_refused_in_one_line(tiny_clip, space, name, options, message):
    with pytest.raises(UsageError) as caught:
        build(name, tiny_clip, space, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_a_class_name_that_does_not_fit_is_named(tiny_clip, name):
    long = "very " * 80 + "long_name"
    with pytest.raises(UserError, match=r"class 'very very .*' *: .*CLIP reads 77"):
        build(name, tiny_clip, LabelSpace(("cat", long)))


def test_every_option_is_described_and_strict():
    for name in METHODS:
        model = method_class(name).Options
        assert all(field.description for field in model.model_fields.values())
        assert model.model_config["frozen"] and model.model_config["extra"] == "forbid"
    assert method_options("procap", {"n_ctx": "8"}).model_dump()["n_ctx"] == 8


def test_a_plugin_joins_by_its_entry_point(tiny_clip, space, tmp_path, monkeypatch):
    theirs = METHOD + "class NotAMethod:\n    pass\n\nclass Bare(CoOp.__base__.__base__):\n    title = 'x'\n"
    theirs += "class Quiet(Theirs):\n    @classmethod\n    def recipe(cls, *task):\n        return CoOp.recipe(*task)\n"
    theirs += "from procap.methods.features import FeatureMethod\nclass Headless(FeatureMethod):\n    pass\n"
    modules = {"their_method": theirs, "half_written": "class Theirs(\n", "exits": "import sys\nsys.exit('bye')\n"}
    modules["stops"] = "raise KeyboardInterrupt\n"
    points = {
        "theirs": "their_method:Theirs", "broken": "no_such_module:Theirs", "odd": "their_method:NotAMethod",
        "half": "half_written:Theirs", "exits": "exits:Theirs", "bare": "their_method:Bare",
        "maple": "their_method:Theirs", "quiet": "their_method:Quiet",
        "headless": "their_method:Headless", "stops": "stops:Theirs",
    }  # fmt: skip
    install(tmp_path, modules, points)
    monkeypatch.syspath_prepend(tmp_path)
    method = build("theirs", tiny_clip, space)
    assert type(method).__name__ == "Theirs" and method.classifier()(pictures()).shape == (3, 5)
    assert method_class("maple").__name__ == "MaPLe"
    reasons = {
        "broken": "cannot be loaded from no_such_module:Theirs: ModuleNotFoundError",
        "half": "cannot be loaded from half_written:Theirs: SyntaxError",
        "exits": "SystemExit: bye .*exits.py, line 2",
        "stops": "cannot be loaded from stops:Theirs: KeyboardInterrupt",
        "odd": "is not a subclass",
        "headless": r"has no head\(\)$",
        "bare": r"has no plans\(\), no recipe\(\)$",
    }
    for name, message in reasons.items():
        with pytest.raises(UsageError, match=message):
            method_class(name)
    assert describe_method("theirs")["summary"] == "Their own method"
    assert describe_method("theirs")["selection"] == "last step"
    assert describe_method("quiet")["recipe"] == "the method's own"


def test_the_code_of_a_built_in_method_covers_the_methods_that_it_builds_on(monkeypatch):
    before = {name: method_source(name) for name in METHODS}
    modules = {path.partition(":")[0] for path in METHODS.values()}
    assert len({source.digest for source in before.values()}) == len(modules)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + b"\nX = 1" * (file.name == "coop.py"))
    changed = {name for name, source in before.items() if method_source(name) != source}
    assert {"coop", "dept", "kdpl", "dpc", "cocoop"} <= changed and not {"maple", "probe", "procap"} & changed


def test_methods_are_described_as_their_classes_say_without_importing_torch():
    for name in METHODS:
        cls = method_class(name)
        texts = describe_method(name)
        assert title_and_colour(name)[0] == vars(cls)["title"]
        assert cls.__doc__.startswith(texts["summary"]) and texts["selection"].startswith(cls.selection)
        assert cls.recipe.__doc__.startswith(f"Return {texts['recipe']}")
    program = "import sys; from benchmarks.cli import main; main(['ls', 'methods']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_the_code_of_a_plug_in_is_that_of_its_modules_without_comments_and_its_version(tmp_path, monkeypatch):
    package = tmp_path / "packed_methods"
    package.mkdir()
    for name in ("__init__", "first", "second"):
        (package / f"{name}.py").write_text("")
    points = {"first": "packed_methods.first:A", "second": "packed_methods.second:B"}
    install(tmp_path, {}, points)
    monkeypatch.syspath_prepend(tmp_path)
    (package / "helper.py").write_text("Y = 1")
    (package / "first.py").write_text("from .helper import Y")
    before = {name: method_source(name) for name in points}
    (package / "first.py").write_text('"""A docstring."""\n# a comment\nfrom  .helper  import Y')
    assert method_source("first") == before["first"]
    (package / "helper.py").write_text("Y = 2")
    assert method_source("first") != before["first"] and "packed_methods" not in sys.modules
    (package / "first.py").write_text("X = 1")
    assert method_source("first") != before["first"] and method_source("second") == before["second"]
    install(tmp_path, {}, points, version="2")
    assert method_source("second") != before["second"]


def test_an_author_has_few_members_to_know():
    attributes = {"space", "group", "image_adapter", "text_adapter", "recipe"}
    public = {name for name in {**vars(Method), **Method.__annotations__} if not name.startswith("_")}
    assert len(public | attributes) <= 25


def test_options_of_a_number_of_tokens_are_valid_for_each_method():
    for name in METHODS:
        for tokens in (2, 4, 16):
            options = method_options(name, method_class(name).Options.of_length(tokens))
            assert getattr(options, "n_ctx", tokens) == tokens
    assert not method_class("mma").Options.of_length(4)


def test_what_few_methods_define_is_seen_by_its_protocol():
    def methods_with(protocol):
        return {name for name in METHODS if issubclass(method_class(name), protocol)}

    assert methods_with(hooks.GradientRule) == {"prograd"}
    assert methods_with(hooks.TaughtMethod) == {"kdpl", "kdpl-maple", "promptkd", "caspl-boost"}
    assert methods_with(hooks.ViewedMethod) == {"tpt", "tpt-coop"}
    assert methods_with(hooks.DiagnosedMethod) == methods_with(hooks.GaussianMethod) == {"procap"}
