"""CLIP-LoRA: low-rank matrices next to the attention's projections of both towers.

Source: Zanella and Ben Ayed 2024, "Low-Rank Few-Shot Adaptation of Vision-Language Models", section 4, and its public
code. Learns 184,320 parameters on ViT-B/16.

Shapes: B images, C classes, D width of a tower, R rank.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from procap.clip import CLIP
from procap.low_rank import Dropout, LowRank
from procap.methods.method import Method, Noise, PublicLayout
from procap.methods.options import TemplateOptions
from procap.methods.prompts import ClassPrompts, check_blocks
from procap.methods.twosfs import TwoSFS
from procap.plan import BLOCKS, Plan
from procap.recipe import Recipe
from procap.text import LabelSpace

STEPS_PER_SHOT = 500
PUBLIC = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "proj"}
"""The projections in the public code."""


class CLIPLoRAOptions(TemplateOptions):
    rank: int = Field(2, ge=1, description="rank of every learned matrix")
    alpha: float = Field(1.0, gt=0, description="the learned product is multiplied by alpha / sqrt(rank)")
    dropout: float = Field(0.25, ge=0, lt=1, description="dropout of a branch's input in training, in steps of 1/256")
    projections: str = Field(
        "qkv", min_length=1, pattern="^q?k?v?o?$", description="adapted projections: some of q, k, v, o (output)"
    )
    first_block: int = Field(0, ge=0, description="first adapted block (0-based) of both towers")


class Factors(nn.ParameterDict):
    """Both factors of every adapted projection of a tower, under their names in the public code."""

    def __init__(self, width: int, blocks: range, options: CLIPLoRAOptions, generator: torch.Generator) -> None:
        """The first factor is drawn as by torch's default for linear layers; the second is zero."""
        super().__init__()
        self.blocks, self.options = blocks, options
        for block in blocks:
            for name in options.projections:
                down = torch.empty(options.rank, width).uniform_(-(width**-0.5), width**-0.5, generator=generator)
                self[_key(block, name, "A")] = nn.Parameter(down)
                self[_key(block, name, "B")] = nn.Parameter(torch.zeros(width, options.rank))

    def branches(self, seed: Tensor | None = None, first: int = 0, step: int = 1) -> dict[int, LowRank]:
        """Return the branches of every block, with dropout if `seed` is given."""
        # The public code divides by the root of the rank, LoRA by the rank.
        factor, rate = self.options.alpha / self.options.rank**0.5, self.options.dropout
        branches = {}
        for block in self.blocks:
            factors = {
                name: (self[_key(block, name, "A")], factor * self[_key(block, name, "B")])
                for name in self.options.projections
            }
            dropout = None if seed is None or not rate else Dropout(rate, seed + block, first, step)
            branches[block] = LowRank(factors, dropout)
        return branches

    def merged(self, tower: nn.Module) -> dict[str, Tensor]:
        """Return the projections of `tower` with the learned products added, as a plan takes them."""
        weights = dict(tower.named_parameters())
        merged: dict[str, Tensor] = {}
        for block, branch in self.branches().items():
            products = {name: up @ down for name, (down, up) in branch.factors.items()}
            name = f"{BLOCKS}{block}.attn.in_proj_weight"
            # [3 D, D] has the rows of queries, keys and values, of which each letter changes a third.
            like = weights[name][: len(weights[name]) // 3]
            added = [products.get(letter, torch.zeros_like(like)) for letter in "qkv"]
            merged[name] = weights[name] + torch.cat(added)
            if "o" in products:
                name = f"{BLOCKS}{block}.attn.out_proj.weight"
                merged[name] = weights[name] + products["o"]
        return merged


def _key(block: int, projection: str, factor: str) -> str:
    # A name of a parameter has no dots: `public_names` puts them in place of the slashes.
    return f"transformer/resblocks/{block}/attn/{PUBLIC[projection]}/w_lora_{factor}"


class CLIPLoRA(Method):
    """CLIP-LoRA (Zanella and Ben Ayed 2024): low-rank matrices in the attention of both towers."""

    Options = CLIPLoRAOptions
    vision_weights = "vision"
    title = "CLIP-LoRA"
    groups = ("adapters",)
    mini_lr = 1e-2
    public_layout = PublicLayout("cliplora", {"vision": "visual.{}", "text": "{}"}, dassl=False)
    options: CLIPLoRAOptions

    def __init__(self, clip: CLIP, space: LabelSpace, options: CLIPLoRAOptions, generator: torch.Generator) -> None:
        g = clip.geometry
        check_blocks(clip, min(g.vision_layers, g.text_layers) - 1, first_block=options.first_block)
        super().__init__(clip, space, options, generator)
        self.vision = Factors(g.vision_width, range(options.first_block, g.vision_layers), options, generator)
        self.text = Factors(g.text_width, range(options.first_block, g.text_layers), options, generator)

    @classmethod
    def recipe(cls, task: str = "base-to-novel", shots: int = 16, dataset: str = "") -> Recipe:
        """Return AdamW 2e-4, batch 32, 500 steps per shot, logged in ten parts; published for few-shot only."""
        changes = {"iterations": STEPS_PER_SHOT * (shots or 16), "test_batch_size": 256}
        return TwoSFS.recipe(task, shots, dataset).model_copy(update=changes)

    def draw(self, generator: torch.Generator) -> Noise:
        """Draw the seed of a step's masks; each block adds its number, the text tower a large one."""
        return (torch.randint(2**62, (), generator=generator),) if self.options.dropout else ()

    def plans(self, prompts: ClassPrompts, noise: Noise | None = None) -> tuple[Plan, Plan]:
        """Build plans with branches for training, whose inputs may have dropout, and with merged weights otherwise.

        Without dropout both are the same function; merged weights cost what plain CLIP costs.
        """
        if not noise:
            return Plan(weights=self.vision.merged(self.clip.visual)), Plan(weights=self.text.merged(self.clip.text))
        [seed] = noise
        # Image i of this rank has number i * size + rank in the global batch; `Plan.select` numbers prompts.
        rank, size = (self.group.rank, self.group.size) if self.group else (0, 1)
        return Plan(branches=self.vision.branches(seed, rank, size)), Plan(branches=self.text.branches(seed + 2**32))
