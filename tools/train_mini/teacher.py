"""Make what the embedded CLIP learns from: a pool of plain pictures of the generated data, and a small convolutional
teacher, since a convolution sees shapes after minutes where a transformer needs hours.

Shapes: B images, S = IMAGE pixels per side, G = 6 patches per side, F teacher features."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from shards.catalogue import CATALOGUE
from shards.rng import generator
from shards.world.generate import Style, image_draws, paint, sample_seed
from shards.world.scenes import COLOUR_PAIRS

IMAGE = 48
FAMILY_NAMES = tuple(name for name, data in CATALOGUE.items() if data.images_from == "world" and not data.test_only)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Pool:
    """Rendered pictures: images uint8 [N, S, S, 3], masks uint8 [N, 24, 24], family and label int64 [N], N captions."""

    images: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    family: NDArray[np.int64]
    label: NDArray[np.int64]
    captions: list[str]

    def __len__(self) -> int:
        return len(self.images)


def shrink(pictures: NDArray[np.uint8], size: int = IMAGE) -> NDArray[np.uint8]:
    """Resize [B, 64, 64, 3] with bicubic anti-aliasing, by the same library as the evaluation transform."""
    resized = [Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC) for picture in pictures]
    return np.stack([np.asarray(picture) for picture in resized])


def draw_pool(per_family: int, split: str, style: Style, seed: int, with_captions: bool = True) -> Pool:
    """Draw `per_family` pictures of every family with labels in turn."""
    parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], list[str]]] = []
    for index, name in enumerate(FAMILY_NAMES):
        classes = CATALOGUE[name].num_classes
        for start in range(0, per_family, 4096):
            labels = np.arange(start, min(start + 4096, per_family), dtype=np.int64) % classes
            seeds = np.array([sample_seed(name, split, start + k, seed) for k in range(len(labels))], np.int64)
            pictures, masks = paint(name, labels, seeds, style)
            coarse = masks.reshape(-1, 32, 2, 32, 2).mean((2, 4))
            # Masks have half the resolution of the 48 x 48 pictures: 4 x 4 values per patch.
            small = shrink(np.repeat(coarse.astype(np.uint8)[..., None], 3, 3), 24)[..., 0]
            pairs = zip(labels.tolist(), seeds.tolist(), strict=True)
            words = [caption(name, label, number) for label, number in pairs] if with_captions else []
            parts.append((shrink(pictures), small, np.full(len(labels), index), labels, words))
    images, masks, family, label = (np.concatenate([part[k] for part in parts]) for k in range(4))
    return Pool(images, masks, family, label, [word for part in parts for word in part[4]])


def caption(family: str, label: int, seed: int) -> str:
    """Describe one plain picture in a sentence: the class, and the colours that the class does not determine."""
    name = CATALOGUE[family].classnames[label]
    if family not in ("shapes", "textures", "glyphs"):
        return CATALOGUE[family].template.format(name)
    draw = image_draws(family, label, np.array([seed], np.int64), "plain")
    first, second = COLOUR_PAIRS[int(draw.integers("pair", len(COLOUR_PAIRS))[0])]
    if family == "textures":
        return f"{name} texture in {first} and {second}."
    return f"a {first} {name} on a {second} background."


def cached_pool(folder: Path, per_family: int, seed: int) -> Pool:
    """Load the training pool from `folder`, or draw and store it, so that a resumed run starts at once."""
    file = folder / f"pool-{per_family}-{seed}.npz"
    if not file.exists():
        pool = draw_pool(per_family, "mini", "plain", seed)
        partial = file.with_suffix(".partial.npz")
        words = np.array(pool.captions)
        np.savez(partial, images=pool.images, masks=pool.masks, family=pool.family, label=pool.label, captions=words)
        partial.replace(file)
    with np.load(file, allow_pickle=False) as stored:
        return Pool(stored["images"], stored["masks"], stored["family"], stored["label"], stored["captions"].tolist())


def batch_tensor(pool: Pool, rows: NDArray[np.int64], rng: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Make normalised images [B, 3, S, S] and masks [B, 24, 24]; with `rng`, change light and tint a little."""
    images = torch.from_numpy(pool.images[rows]).permute(0, 3, 1, 2).float().div_(255)
    masks = torch.from_numpy(pool.masks[rows]).float().div_(255)
    if rng is not None:
        gain = 0.8 + 0.4 * torch.rand(len(images), 1, 1, 1, generator=rng)
        gain = gain + 0.06 * torch.randn(len(images), 3, 1, 1, generator=rng)
        images = (images - 0.5) * gain + 0.5 + 0.08 * torch.randn(len(images), 1, 1, 1, generator=rng)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (CLIP_MEAN, CLIP_STD))
    return (images - mean) / std, masks


def class_offsets() -> list[int]:
    """Return where each family's classes begin in the list of all classes."""
    counts = [CATALOGUE[name].num_classes for name in FAMILY_NAMES]
    return [sum(counts[:k]) for k in range(len(counts) + 1)]


class Teacher(nn.Module):
    """Five strided convolutions: features [B, F, 6, 6] and logits over all classes of all families."""

    def __init__(self, classes: int, features: int = 128) -> None:
        super().__init__()
        plan = [(3, 32, 5, 2), (32, 64, 3, 2), (64, 64, 3, 1), (64, features, 3, 2), (features, features, 3, 1)]
        layers: list[nn.Module] = []
        for wide_in, wide_out, kernel, stride in plan:
            convolution = nn.Conv2d(wide_in, wide_out, kernel, stride, kernel // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(wide_out), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.head = nn.Linear(features * 4, classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        # Pool four quarters instead of the whole image: the position of a stroke distinguishes a seven from an L.
        pooled = functional.adaptive_avg_pool2d(functional.relu(features), 2).flatten(1)
        return features, self.head(pooled)


def train_teacher(pool: Pool, file: Path, seed: int, images: int, batch: int = 96) -> Teacher:
    """Train the teacher on `images` pictures of the pool (AdamW, one cycle), or load it from `file`."""
    offsets = class_offsets()
    torch.manual_seed(seed)
    teacher = Teacher(offsets[-1])
    if file.exists():
        teacher.load_state_dict(torch.load(file, weights_only=True))
        return teacher.eval()
    rng, steps, started = generator(seed, "teacher"), images // batch, time.monotonic()
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=4e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.15)
    targets = torch.from_numpy(pool.label) + torch.tensor(offsets)[torch.from_numpy(pool.family)]
    right = 0
    for step in range(1, steps + 1):
        rows = torch.randint(len(pool), (batch,), generator=rng)
        pictures, _ = batch_tensor(pool, rows.numpy(), rng)
        _, logits = teacher(pictures)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(logits, targets[rows]).backward()
        optimizer.step()
        schedule.step()
        right += int((logits.argmax(1) == targets[rows]).sum())
        if step % 200 == 0:
            spent = time.monotonic() - started
            print(f"teacher {step}/{steps} accuracy {right / (200 * batch):.3f} {spent:.0f}s", flush=True)
            right = 0
    torch.save(teacher.state_dict(), file)
    return teacher.eval()
