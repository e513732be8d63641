"""The frozen CLIP: two towers (`procap.towers`) and the temperature; every size is read from the weights.

Shapes: B images, C classes (or any prompts), T token ids per prompt, S token sets, E joint embedding.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from procap.geometry import Geometry
from procap.plan import NO_CHANGE, Plan
from procap.prompt_packing import PromptSet
from procap.towers import OpenClipTower, TextTower, VisionTower
from procap.weights.architectures import check_towers

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImagePreparation:
    """How images are prepared: resized, then normalised by `mean` and `std` of each channel.

    squash: resizes to a square instead of the shorter side and a crop.
    """

    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD
    interpolation: str = "bicubic"
    squash: bool = False


class CLIP(nn.Module):
    """Both towers, the temperature, and the bias of a model trained with a sigmoid; frozen, in evaluation mode.

    geometry, name, pretrained: what was loaded.
    preparation: how its images are resized and normalised.
    visual, text: towers of `procap.towers`, or open_clip's own modules (`OpenClipTower`), which no method changes.
    optimized: whether encoding takes the exact shortcuts of `procap.towers`.
    fused_kernels: whether ProCAP compiles its cross-attention; `runner.acceleration` decides.
    """

    logit_bias: Tensor | None

    def __init__(
        self,
        geometry: Geometry,
        name: str = "custom",
        pretrained: str = "random",
        preparation: ImagePreparation = ImagePreparation(),
        visual: OpenClipTower | None = None,
        text: OpenClipTower | None = None,
    ) -> None:
        super().__init__()
        self.geometry, self.name, self.pretrained = geometry, name, pretrained
        self.preparation = preparation
        self.optimized, self.fused_kernels = True, False
        # Methods are checked against `plain_towers` before they use a tower, so that the types hold for them.
        self.visual = cast(VisionTower, visual or VisionTower(geometry))
        self.text = cast(TextTower, text or TextTower(geometry))
        self.logit_scale = nn.Parameter(torch.empty(()))
        # A buffer that is None is not in the state dict; `from_state` adds it for models trained with a sigmoid.
        self.register_buffer("logit_bias", None)
        self._digest = ""

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], geometry: Geometry, **about: object) -> CLIP:
        """Build a float32 CLIP from `state` (CustomTextCLIP names); ValueError names what does not fit.

        about: what `CLIP` takes as well. The weights of frozen towers are not among those of `state`.
        """
        # Without storage first: no default initialisation runs, and the global random state stays untouched.
        with torch.device("meta"):
            clip = cls(geometry, **about)  # type: ignore[arg-type]
            if "logit_bias" in state:
                clip.logit_bias = torch.empty(())
        # Frozen towers of open_clip have their weights already: only what is still on the meta device is missing.
        expected = {name: weight for name, weight in clip.state_dict().items() if weight.is_meta}
        if problems := describe_differences(expected, state):
            raise ValueError("; ".join(problems))
        # A copy even of float32 tensors, which `float` returns as they are: the caller keeps its state dict.
        weights = {name: state[name].detach().float().clone() for name in expected}
        if broken := [name for name, weight in weights.items() if not weight.isfinite().all()]:
            raise ValueError(f"has values in {broken[0]} that are not finite")
        clip.load_state_dict(weights, strict=False, assign=True)
        return clip.requires_grad_(False).eval()

    @classmethod
    def random(cls, geometry: Geometry, seed: int = 0, **about: object) -> CLIP:
        """Build a CLIP with random weights, scaled as CLIP's own initialisation, from `seed` alone."""
        with torch.device("meta"):
            shapes = cls(geometry).state_dict()
        generator = torch.Generator().manual_seed(seed)
        state = {name: _initial(name, like, geometry, generator) for name, like in shapes.items()}
        return cls.from_state(state, geometry, **about)

    def train(self, mode: bool = True) -> CLIP:
        """Stay in evaluation mode: a frozen model inside a module that is switched to training must not change."""
        return super().train(False)

    @property
    def plain_towers(self) -> tuple[str, ...]:
        """The towers ("image", "text") that methods can change."""
        towers = {"image": self.visual, "text": self.text}
        return tuple(name for name, tower in towers.items() if not isinstance(tower, OpenClipTower))

    @property
    def device(self) -> torch.device:
        return self.logit_scale.device

    def without_optimizations(self) -> CLIP:
        """Return a CLIP that shares the model, weights and device but takes no shortcuts."""
        twin = copy.copy(self)
        twin.optimized = False
        return twin

    def encode_image(self, images: Tensor, plan: Plan = NO_CHANGE) -> Tensor:
        """Encode images [B, 3, H, W] to features [B, E], not normalised."""
        features = self.visual(images, plan, self.optimized)
        # An `OpenClipTower` returns features alone, a `VisionTower` also the rows of `read_op`.
        return features if isinstance(features, Tensor) else features[0]

    def encode_image_rows(self, images: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Encode images to features [B, E] and the final states [B, P, D] of the rows of operation `plan.read_op`."""
        features, states = self.visual(images, plan, self.optimized)
        assert states is not None
        return features, states

    def encode_image_with_frozen(self, images: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `encode_image_rows` returns, and the features [B, E] without a plan."""
        features, states, frozen = self.visual.encode_with_frozen(images, plan, self.optimized)
        assert states is not None
        return features, states, frozen

    def encode_patches(self, images: Tensor, plan: Plan = NO_CHANGE) -> tuple[Tensor, Tensor]:
        """Encode images to the states [B, N, D] of their N patches and to features [B, E], those of `encode_image`.

        The patches have passed the last block without attention, with their own values, and the last LayerNorm;
        `visual.proj` maps them to the joint space. Source: Lafon et al. 2024, GalLoP.
        Raises UsageError for an image tower that is no plain transformer.
        """
        check_towers("encode_patches", ("image",), self.name, self.plain_towers)
        return self.visual.encode_patches(images, plan, self.optimized)

    def encode_text(self, prompts: Tensor | PromptSet, plan: Plan = NO_CHANGE) -> Tensor:
        """Encode token ids [C, T] to features [C, E], not normalised; [S, C, E] under a plan with S token sets.

        prompts: pass a `PromptSet` to encode the same prompts repeatedly: it is laid out once instead of at every call.
        Raises UserError when a prompt with its inserted tokens is longer than the context.
        """
        return self.text(prompts, plan, self.optimized)

    def encode_text_from(self, block: int, prompts: PromptSet, chosen: Tensor, plan: Plan) -> Tensor:
        """Encode the prompts `chosen` [K] to features [K, E], under a plan that changes nothing before `block`."""
        return self.text.encode_from(block, prompts, chosen, plan, self.optimized)

    def token_embedding(self, ids: Tensor) -> Tensor:
        """Look up word embeddings [..., D] of token ids [...], without positions."""
        return self.text.token_embedding(ids)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Tokenize texts to ids [C, context_length] on this model's device; UserError names a text that is too long."""
        from procap.tokenizer import model_tokenizer, tokenize

        if isinstance(self.text, OpenClipTower) and self.text.tokenizer:
            return model_tokenizer(self.text.tokenizer)(list(texts)).to(self.device)
        return tokenize(texts, self.geometry.context_length).to(self.device)

    def unknown_names(self, names: Sequence[str]) -> list[str]:
        """List names in which no word has a learned embedding; CLIPs trained on large data have none.

        `mini` gives all words that it was not trained on one embedding, and so cannot distinguish such classes.
        """
        if isinstance(self.text, OpenClipTower):
            return []
        # Without the start token, padding (0), and the end token, which has the largest id.
        spelled = [set(row) - {0, max(row)} for row in self.tokenize(names)[:, 1:].tolist()]
        # Add ten rare tokens: all unknown tokens share one embedding, so even a single one has an equal.
        used = torch.tensor(sorted(set(range(47000, 47010)).union(*spelled)), device=self.device)
        used = used[used < len(self.text.token_embedding.weight)]
        _, rows, counts = self.token_embedding(used).unique(dim=0, return_inverse=True, return_counts=True)
        shared = set(used[counts[rows] > 1].tolist())
        return [name for name, tokens in zip(names, spelled, strict=True) if tokens <= shared]

    def digest(self) -> str:
        """Return sixteen hexadecimal digits of a SHA-256 over geometry, weights and how images are prepared."""
        if self._digest:
            return self._digest
        # A new field of `Geometry` changes every digest, by which finished runs recognise their backbone.
        sha = hashlib.sha256(repr(self.geometry).encode())
        if self.preparation != ImagePreparation():
            sha.update(repr(self.preparation).encode())
        for name, weight in sorted(self.state_dict().items()):
            sha.update(name.encode())
            sha.update(weight.detach().cpu().float().contiguous().numpy().tobytes())
        self._digest = sha.hexdigest()[:16]
        return self._digest


def describe_differences(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> list[str]:
    """Describe how the names and shapes of `actual` differ from those of `expected`; lists the first few."""
    missing = [name for name in expected if name not in actual]
    extra = [name for name in actual if name not in expected]
    shapes = [
        f"{name} is {list(actual[name].shape)}, expected {list(like.shape)}"
        for name, like in expected.items()
        if name in actual and actual[name].shape != like.shape
    ]
    lists = {"": shapes, "lacks ": missing, "has unknown ": extra}
    return [
        start + ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        for start, names in lists.items()
        if names
    ]


def _initial(name: str, like: Tensor, geometry: Geometry, generator: torch.Generator) -> Tensor:
    """Initialise one parameter as CLIP does (openai/CLIP, `initialize_parameters`), for both towers alike."""
    if name == "logit_scale":
        return torch.tensor(1 / 0.07).log()
    # Of all weights those of LayerNorms alone have one dimension.
    if like.dim() == 1 and name.endswith("weight"):
        return torch.ones(like.shape)
    if name.endswith("bias"):
        return torch.zeros(like.shape)
    vision = name.startswith("visual.")
    width = geometry.vision_width if vision else geometry.text_width
    layers = geometry.vision_layers if vision else geometry.text_layers
    if name.endswith("token_embedding.weight"):
        std = 0.02
    # Smaller by the root of the number of residual additions, two per block.
    elif name.endswith(("out_proj.weight", "c_proj.weight")):
        std = (2 * layers * width) ** -0.5
    elif name.endswith("c_fc.weight"):
        std = (2 * width) ** -0.5
    else:
        std = width**-0.5
    return std * torch.randn(like.shape, generator=generator)
