"""Every architecture of open_clip loads and encodes as open_clip does; those without plain towers run frozen."""

import json
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small_runs import seeded
from tiny_geometry import SHORT_OPTIONS, UNTRAINED

from benchmarks.cli import main
from procap.classifier import Classifier, unit
from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import METHODS, build_method, method_class
from procap.methods.features import FeatureMethod
from procap.plan import NO_CHANGE
from procap.teacher import text_features
from procap.towers import OpenClipTower
from procap.weights.architectures import model_configs, plain_towers
from procap.weights.loading import load_clip
from runner.setup import make_eval_transform

WITHOUT_TRANSFORMERS = [name for name, config in model_configs().items() if "hf_model_name" not in config["text_cfg"]]
REPRESENTATIVE = [
    "ViT-B-32", "ViT-B-32-quickgelu", "ViT-M-16-alt", "RN50", "ViT-B-32-SigLIP2-256", "EVA02-B-16", "coca_ViT-B-32",
]  # fmt: skip


@pytest.fixture
def shallow(monkeypatch):
    """A function that makes one block a stage, or one a tower, of an architecture, and its vocabulary small."""
    # Imported in functions, because every test worker imports all files, and this takes seconds.
    import open_clip
    import timm

    create = timm.create_model

    def create_shallow(name: str, **settings: Any) -> torch.nn.Module:
        stages = 5 if name.endswith(("mci3", "mci4")) else 4
        # A ViT, ConvNeXt or Swin, FastViT, and what takes none of these.
        for depth in ({"depth": 1}, {"depths": (1,) * stages}, {"layers": (1,) * stages}, {}):
            try:
                return create(name, **settings, **depth)
            except (TypeError, RuntimeError, AssertionError):
                continue
        raise AssertionError(f"timm cannot build {name}")

    def cut(name: str, words: int = 600) -> None:
        config = json.loads(json.dumps(model_configs()[name]))
        vision, text = config["vision_cfg"], config["text_cfg"]
        if "layers" in vision:
            vision["layers"] = [1, 1, 1, 1] if isinstance(vision["layers"], list) else 1
        text |= {"layers": 1, "vocab_size": words}
        config["multimodal_cfg"] = {**config["multimodal_cfg"], "layers": 1} if "multimodal_cfg" in config else None
        config = {key: value for key, value in config.items() if value is not None}
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)

    monkeypatch.setattr(timm, "create_model", create_shallow)
    return cut


def test_a_frozen_tower_encodes_texts_in_parts_and_a_batch_of_images_as_it_is():
    sizes = []

    class Counting(torch.nn.Module):
        def forward(self, part):
            sizes.append(len(part))
            return part.flatten(1)

    tower = OpenClipTower(Counting())
    assert tower(torch.zeros(3000, 3, 2, 2)).shape == (3000, 12) and sizes == [3000]
    assert tower(torch.zeros(300, 77)).shape == (300, 77) and sizes[1:] == [106, 106, 88]


def assert_encodes_as_open_clip(name: str, tmp_path, cut) -> CLIP:
    import open_clip

    cut(name)
    theirs = open_clip.create_model(name, load_weights=False).eval()
    save_file({key: weight.contiguous() for key, weight in theirs.state_dict().items()}, tmp_path / "w.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": model_configs()[name]}))
    ours = load_clip(name, str(tmp_path / "w.safetensors"))
    assert ours.plain_towers == plain_towers(model_configs()[name])
    size, context = ours.geometry.image_size, ours.geometry.context_length
    images = torch.randn(2, 3, size, size, generator=seeded(1))
    ids = torch.randint(1, 500, (3, context), generator=seeded(2))
    # The end of the text has the largest id.
    ids[:, 4], ids[:, 5:] = 599, 0
    with torch.no_grad():
        wanted = theirs.encode_image(images, normalize=False), theirs.encode_text(ids, normalize=False)
        for clip in (ours, ours.without_optimizations()):
            for ours_features, features in zip((clip.encode_image(images), clip.encode_text(ids)), wanted, strict=True):
                assert ours_features.shape[1] == ours.geometry.embed_dim
                assert (ours_features - features).abs().max() <= 2e-5 * max(1, features.abs().max())
    assert torch.equal(ours.logit_scale, theirs.logit_scale)
    assert (ours.logit_bias is None) == (theirs.logit_bias is None)
    return ours


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_an_architecture_encodes_as_open_clip_does(name, tmp_path, shallow):
    assert_encodes_as_open_clip(name, tmp_path, shallow)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITHOUT_TRANSFORMERS if name not in ("mini", *REPRESENTATIVE)])
def test_every_architecture_encodes_as_open_clip_does(name, tmp_path, shallow):
    assert_encodes_as_open_clip(name, tmp_path, shallow)


def test_at_least_115_architectures_need_no_other_package():
    assert len(WITHOUT_TRANSFORMERS) - 1 >= 115


def test_backbones_are_listed_with_the_methods_that_they_admit(capsys):
    assert main(["ls", "backbones", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert "224 px, patch 16, widths 768/512" in rows["ViT-B-16"]["note"] and "openai" in rows["ViT-B-16"]["tags"]
    admitted = {"ViT-B-16": "all", "RN50": "text only", "ViT-B-16-SigLIP2": "features only"}
    assert {name: rows[name]["methods"] for name in admitted} == admitted


def test_a_resnet_takes_the_methods_that_leave_the_image_tower_alone(shallow, tiny_space):
    shallow("RN50", words=49408)
    clip = load_clip("RN50", "random")
    assert clip.geometry.quick_gelu and clip.digest() == load_clip("RN50", "random").digest()
    images, labels = torch.randn(2, 3, 224, 224, generator=seeded(3)), torch.tensor([0, 3])
    for name in METHODS:
        options = SHORT_OPTIONS.get(name, {}) | ({"block": 0} if name == "tcp" else {})
        if "image" in method_class(name).changes:
            with pytest.raises(UsageError, match=f"^{name} needs a plain ViT as image tower, which RN50"):
                build_method(name, clip, tiny_space, options, seeded())
            continue
        method = build_method(name, clip, tiny_space, options, seeded())
        if isinstance(method, FeatureMethod) or method.required_option == "teacher":
            continue
        loss = sum(method.loss(images, labels, ()).values())
        if name not in UNTRAINED:
            loss.backward()
            assert all(parameter.grad is not None for parameter in method.parameters())


def test_a_method_that_a_backbone_does_not_admit_is_refused_before_anything_is_loaded(capsys):
    for backbone, method, tower in (("RN50", "maple", "a plain ViT"), ("ViT-B-16-SigLIP", "coop", "CLIP's own text")):
        assert main(["train", "--methods", method, "--datasets", "digits", "--backbone", backbone]) == 2
        assert f"{method} needs {tower}" in capsys.readouterr().err


def test_a_sigmoid_model_uses_its_scale_and_bias(shallow):
    shallow("ViT-B-32-SigLIP2-256")
    clip = load_clip("ViT-B-32-SigLIP2-256", "random")
    text, image = torch.randn(3, 768, generator=seeded(1)), torch.randn(2, 768, generator=seeded(2))
    logits = Classifier(clip, NO_CHANGE, text, clip.logit_scale.exp()).logits(image)
    torch.testing.assert_close(logits, 1 / 0.07 * unit(image) @ unit(text).t() - 10)
    with pytest.raises(UserError, match="the tokenizer of ViT-B-32-SigLIP2-256 needs the package transformers"):
        text_features(clip, ["a photo of a cat."])


@pytest.mark.parametrize("name", ["ViT-B-32-SigLIP2-256", "PE-Core-T-16-384", "MobileCLIP2-S0"])
def test_images_are_prepared_as_open_clip_does(name, shallow):
    import open_clip
    from open_clip.transform import PreprocessCfg, image_transform_v2

    shallow(name)
    tags = open_clip.list_pretrained_tags_by_model(name)
    settings = open_clip.get_pretrained_cfg(name, tags[0])
    clip = load_clip(name, "random")
    names = ("mean", "std", "interpolation", "resize_mode")
    theirs = PreprocessCfg(size=clip.geometry.image_size, **{key: settings[key] for key in names})
    image = Image.fromarray(torch.randint(0, 256, (300, 400, 3), generator=seeded(), dtype=torch.uint8).numpy())
    assert torch.equal(make_eval_transform(clip)(image), image_transform_v2(theirs, is_train=False)(image))


@pytest.mark.slow
def test_methods_of_every_sort_run_on_a_resnet(few_digits, tmp_path):
    run = ["--methods", "zeroshot,coop,taskres", "--datasets", "digits", "--shots", "1", "--epochs", "1"]
    run += ["--batch-size", "5", "--backbone", "RN50", "--pretrained", "random", "--device", "cpu", "--tracking", "off"]
    run += ["--data", str(few_digits), "--results", str(tmp_path)]
    assert main(["train", *run]) == 0
    assert main(["eval", *run, "--targets", "digits:base", "--limit", "2"]) == 0
    assert len([*tmp_path.glob("base/digits/*/RN50/*/*/eval/*.json")]) == 3
