"""Export trained runs as models that other programs run: an ONNX graph, or a timm model with a linear classifier.

Both are float32 and return the logits of the classes that the run learned. An ONNX graph is the whole classifier with
its prompts and adapters. timm has no such parts, so its image tower must be a plain one, whose weights may be learned.

Shapes: B images, C classes, E joint embedding, S image size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from procap.classifier import Classifier, HeadClassifier, unit
from procap.clip import CLIP
from procap.errors import UserError
from procap.methods.adapters import FeatureAdapter
from runner.config import RunConfig, RuntimeConfig
from runner.evaluate import TrainedRun, load_trained
from runner.results import write_bytes
from shards.rng import generator

TOLERANCE = 1e-4
"""Largest difference of a head from the linear map that replaces it, relative and absolute."""


def export_model(config: RunConfig, runtime: RuntimeConfig, out: Path, format: str) -> Path:
    """Write the finished run `config` below `out`; returns the ONNX file or the folder of the timm model.

    format: onnx or timm. Raises UserError if the run is not finished, or its classifier cannot be such a model.
    """
    # On the CPU, where the example of ONNX and the features of `linear_head` are.
    trained = load_trained(config, replace(runtime, device="cpu", accelerate="off"))
    if trained.method.depends_on_image:
        raise UserError(f"{config.method} computes class features for each image, which no exported classifier does")
    folder = out / config.path / format
    return export_onnx(trained, folder / "model.onnx") if format == "onnx" else export_timm(trained, folder)


class _Logits(nn.Module):
    """A classifier as a module, whose gradient mode the caller chooses."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier.logits(self.classifier.encode(images))


def export_onnx(trained: TrainedRun, file: Path) -> Path:
    """Write a graph from `images` [B, 3, S, S] to `logits` [B, C]; its metadata has class names and normalisation."""
    clip = trained.clip
    # torch.export takes a dimension of size 1 for a constant, so the example has two images.
    images = torch.zeros(2, 3, clip.geometry.image_size, clip.geometry.image_size)
    try:
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass

        program = torch.onnx.export(
            _Logits(trained.method.classifier()).eval(),
            (images,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            verbose=False,
        )
    except ImportError as error:
        raise UserError(f"{error}; install what this needs: pip install procap-bench[export]") from error
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # stack traces at nodes name local folders
    program.model.metadata_props["procap"] = json.dumps(describe_inputs(trained))
    file.parent.mkdir(parents=True, exist_ok=True)
    program.save(file)
    return file


def describe_inputs(trained: TrainedRun) -> dict[str, object]:
    """Describe the classes and how images are prepared, as plain JSON."""
    clip = trained.clip
    return {
        "run": trained.config.path,
        "classnames": list(trained.method.space.names()),
        "image_size": clip.geometry.image_size,
        "mean": list(clip.image_mean),
        "std": list(clip.image_std),
        "interpolation": clip.interpolation,
        "resize": "squash" if clip.squash else "shorter side, then the centre",
    }


def export_timm(trained: TrainedRun, folder: Path) -> Path:
    """Write the image tower as `timm.create_model("local-dir:FOLDER")` loads it, and what follows it.

    classifier.safetensors has `weight` [C, E] and `bias` [C]; README.md is the code that computes logits.
    """
    from safetensors.torch import save_file
    from timm.models import save_for_hf

    config, clip, classifier = trained.config, trained.clip, trained.method.classifier()
    plan = classifier.image_plan
    if "image" not in clip.plain_towers or plan.tokens or plan.adapters or plan.branches:
        reason = "its image tower has prompts, adapters or branches, or is no ViT; --format onnx has no such limit"
        raise UserError(f"{config.method} cannot be a timm model: {reason}")
    adapter, logits = split_adapter(classifier)
    head = linear_head(logits, clip.geometry.embed_dim)
    if head is None:
        raise UserError(f"{config.method} cannot be a timm model: its head is not linear; export it with --format onnx")
    weight, bias, is_normalised = head
    tensors = {"weight": weight.contiguous(), "bias": bias.contiguous()}
    if adapter is not None:
        # Layers 1 and 3 are ReLUs.
        learned = adapter.state_dict()
        tensors |= {"down": learned["0.weight"], "up": learned["2.weight"]}
    model, sizes = timm_tower(clip, clip.visual.state_dict() | dict(classifier.image_plan.weights))
    folder.mkdir(parents=True, exist_ok=True)
    save_for_hf(model, str(folder), model_args=sizes, safe_serialization=True)
    save_file(tensors, folder / "classifier.safetensors", {"procap": json.dumps(describe_inputs(trained))})
    write_bytes(folder / "README.md", timm_readme(trained, adapter, is_normalised).encode())
    return folder


def timm_tower(clip: CLIP, weights: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Build timm's model of images to features [B, E] with the weights of an image tower; also returns its sizes."""
    import timm
    from timm.models.vision_transformer import checkpoint_filter_fn

    g = clip.geometry
    sizes: dict[str, Any] = {
        "img_size": g.image_size,
        "patch_size": g.patch_size,
        "embed_dim": g.vision_width,
        "depth": g.vision_layers,
        "num_heads": g.vision_heads,
        "mlp_ratio": g.vision_mlp / g.vision_width,
    }
    # The name chooses CLIP's kind of ViT, with a norm before the blocks, and the activation; its sizes are replaced.
    name = f"vit_base_patch16_clip_{'quickgelu_' * g.quick_gelu}224"
    about = {
        "architecture": name,
        "input_size": (3, g.image_size, g.image_size),
        "fixed_input_size": True,
        "mean": clip.image_mean,
        "std": clip.image_std,
        "interpolation": clip.interpolation,
        # CLIP's transform enlarges the shorter side to the image size, while timm's default leaves a margin to cut.
        "crop_pct": 1.0,
        "crop_mode": "squash" if clip.squash else "center",
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    model: Any = timm.create_model(name, num_classes=g.embed_dim, pretrained_cfg=about, **sizes)
    # timm converts the names of OpenAI's CLIP.
    model.load_state_dict(checkpoint_filter_fn({f"visual.{part}": value for part, value in weights.items()}, model))
    return model, sizes


def split_adapter(classifier: Classifier) -> tuple[FeatureAdapter | None, Callable[[Tensor], Tensor]]:
    """Split the logits of image features [B, E] into the adapter before the head, if there is one, and the head."""
    twin = copy.copy(classifier)
    head: Any = getattr(twin, "head", None)
    adapter = head.keywords.get("adapter") if isinstance(head, partial) else getattr(twin, "adapter", None)
    if not isinstance(adapter, FeatureAdapter):
        return None, classifier.logits
    if isinstance(twin, HeadClassifier):
        twin.head = partial(head, adapter=nn.Identity())
    else:
        twin.adapter = nn.Identity()
    return adapter, twin.logits


@torch.no_grad()
def linear_head(logits: Callable[[Tensor], Tensor], width: int) -> tuple[Tensor, Tensor, bool] | None:
    """Find weight [C, E] and bias [C] of a head, and whether it normalises features first; None if it is not linear.

    A head that maps e to W e + b is known from its values at plus and minus each unit vector. Random features then show
    whether it is that function, of the features or of the normalised features.
    """
    above, below = logits(torch.eye(width)) / 2, logits(-torch.eye(width)) / 2
    # Both are [E, C]; each row of their sum is the bias.
    weight, bias = (above - below).t(), (above + below)[0]
    features = torch.randn(64, width, generator=generator(0, "export"))
    expected = logits(features)
    for is_normalised, inputs in ((True, unit(features)), (False, features)):
        if torch.allclose(F.linear(inputs, weight, bias), expected, rtol=TOLERANCE, atol=TOLERANCE):
            return weight, bias, is_normalised
    return None


def timm_readme(trained: TrainedRun, adapter: FeatureAdapter | None, is_normalised: bool) -> str:
    """Write the code that computes logits with an exported timm model."""
    steps = ["features = model(images)  # prepared as timm.data.resolve_model_data_config(model) says"]
    if adapter is not None:
        bottleneck = 'torch.relu(torch.relu(features @ head["down"].T) @ head["up"].T)'
        steps.append(f"features = {adapter.share} * {bottleneck} + {1 - adapter.share} * features")
    if is_normalised:
        steps.append("features = features / features.norm(dim=-1, keepdim=True)")
    steps.append('logits = features @ head["weight"].T + head["bias"]')
    lines = [
        f"# {trained.config.path}\n\n```python\nimport timm\nimport torch\nfrom safetensors.torch import load_file\n",
        'model = timm.create_model("local-dir:.", pretrained=True).eval()  # this folder',
        'head = load_file("classifier.safetensors")',
        *steps,
        f"```\n\nClasses: {', '.join(trained.method.space.names())}",
    ]
    return "\n".join(lines) + "\n"
