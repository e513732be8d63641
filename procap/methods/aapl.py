"""AAPL: CoCoOp whose shift of the context should move with an augmentation of the image, not with the image.

Source: Kim et al. 2024, "AAPL: Adding Attributes to Prompt Learning for Vision-Language Models", and its public code.
Learns 35,360 parameters on ViT-B/16.

Shapes: B images, C classes, D text width, S image size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from procap.classifier import unit
from procap.methods.cocoop import CoCoOp, conditional_logits
from procap.methods.coop import ContextOptions
from procap.methods.method import Noise
from procap.parallel import gather_batch

MARGIN = 0.2
"""Of the triplets; the public code has an option for it, which it does not read."""


class AAPLOptions(ContextOptions):
    ctx_init: str = Field("", description="words to start from; empty draws N(0, 0.02)")
    triplet_weight: float = Field(0.2, ge=0, description="weight of both triplets (alpha)")
    ce_weight: float = Field(1.0, ge=0, description="weight of the cross-entropy (beta)")


class AAPL(CoCoOp):
    """AAPL (Kim et al. 2024): CoCoOp with triplets of augmented images."""

    Options = AAPLOptions
    title = "AAPL"
    mini_lr = 2.5e-3
    # A public checkpoint holds the whole CLIP under different names.
    public_layout = None  # type: ignore[assignment]
    options: AAPLOptions

    def extend_batch(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Put with each image one of another class, and both under two augmentations: [B, 6, 3, S, S].

        The order is 1, 2, 1A, 1B, 2A, 2B.
        """
        pool = self.training_images
        rank, size = (self.group.rank, self.group.size) if self.group else (0, 1)
        seeds = torch.randint(2**62, (len(labels),), generator=generator).tolist()
        sets = []
        # Images are this rank's, labels and seeds the global batch's: image i of rank r has number i W + r.
        for image, label, seed in zip(images.cpu(), labels.tolist()[rank::size], seeds[rank::size], strict=True):
            draws = torch.Generator().manual_seed(seed)
            others = pool.labels.unique()
            other = draw_item(others[others != label], draws)
            pair = [image, pool.image(draw_item((pool.labels == other).nonzero()[:, 0], draws), draws)]
            first, second = torch.randperm(len(distortions(image.shape[-1])), generator=draws)[:2].tolist()
            sets.append(torch.stack([*pair, *(distort(each, i, draws) for each in pair for i in (first, second))]))
        return torch.stack(sets).to(images), labels

    def loss(self, images: Tensor, labels: Tensor, noise: Noise) -> dict[str, Tensor]:
        """Compute the cross-entropy of the first images, and the triplets of six: 1, 2, 1A, 1B, 2A, 2B."""
        if images.dim() == 4:
            return {"ce": self.options.ce_weight * super().loss(images, labels, noise)["ce"]}
        features = self.clip.encode_image(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        # Only the first image classifies; the triplets see the network's shifts, not the context or the classes.
        words, scale = self.prompts.tokenized, self.scale()
        logits = conditional_logits(self.clip, features[:, 0], words, self.context, self.meta_net, scale)
        shifts = self.meta_net(unit(features)).float()
        first_a, first_b = (shifts[:, i] - shifts[:, 0] for i in (2, 3))
        second_a, second_b = (shifts[:, i] - shifts[:, 1] for i in (4, 5))
        # Near: another image under the same augmentation; far: the same image under the other augmentation.
        triplets = triplet(first_a, second_a, first_b) + triplet(second_b, first_b, second_a)
        return {
            "ce": self.options.ce_weight * F.cross_entropy(gather_batch(self.group, logits), labels),
            "triplet": self.options.triplet_weight * gather_batch(self.group, triplets).mean(),
        }


def triplet(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the hinge [B] of squared distances: the anchor [B, D] should be nearer to the positive."""
    near, far = ((anchor - other).square().sum(dim=1) for other in (positive, negative))
    return F.relu(near - far + MARGIN)


def draw_item(items: Tensor, generator: torch.Generator) -> int:
    return int(items[torch.randint(len(items), (), generator=generator)])


def distort(image: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Apply one of `distortions` to an image [3, S, S] on the CPU."""
    # torchvision draws from the global generator. `torch.manual_seed` would change those of GPUs too.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return [*distortions(image.shape[-1]).values()][number](image)


@functools.cache
def distortions(size: int) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Return the 14 augmentations of the public code by name, which it applies to normalised images."""
    # This import takes seconds, and no other method needs it.
    from torchvision import transforms
    from torchvision.transforms.functional import crop

    def sobel(image: Tensor) -> Tensor:
        kernel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        # Colours become a batch of one channel, [3, 1, S, S]; the norm over both directions gives [3, S, S].
        padded = F.pad(image[:, None], (1, 1, 1, 1), mode="reflect")
        return F.conv2d(padded, torch.stack([kernel, kernel.t()])[:, None]).norm(dim=1)

    # 30 and 224 pixels at the public code's image size of 224.
    offset = round(30 / 224 * size)
    return {
        "color_jitter_red": transforms.ColorJitter(1.5, 1.0, 1.0, 0.2),
        "color_jitter_green": transforms.ColorJitter(1.0, 1.0, 1.5, 0.0),
        "color_jitter_blue": transforms.ColorJitter(1.0, 1.0, 1.0, 0.5),
        "grayscale": transforms.Grayscale(3),
        "gaussian_noise": lambda image: image + torch.randn_like(image),
        "gaussian_blur": transforms.GaussianBlur(3),
        "horizontal_flip": transforms.RandomHorizontalFlip(1.0),
        "vertical_flip": transforms.RandomVerticalFlip(1.0),
        **{f"rotation_{angle}": transforms.RandomRotation((angle, angle)) for angle in (90, 180, 270)},
        "crop": lambda image: crop(image, offset, offset, size, size),
        "cutout": transforms.RandomErasing(1.0, scale=(0.5, 0.5), ratio=(0.3, 3.3)),
        "sobel_filter": sobel,
    }
