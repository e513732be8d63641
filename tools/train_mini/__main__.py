"""Train the embedded CLIP `mini`: a ViT CLIP like OpenAI's with 12 layers of width 128 in both towers.

It is trained on plain pictures of the generated data, and is small enough to ship.

    python -m tools.train_mini --out procap/weights/mini.safetensors

takes about 52 minutes on 2 CPU cores: drawing the pictures (2), the convolutional teacher (4), mini (46). A run that is
stopped continues from its last checkpoint in `--work`. It starts 3 layers deep; twice a block that is the identity
at first is inserted after every block, which costs less than training all 12 layers from the start.

Shapes: B images, C classes, N prompts, L sequence, D width, E joint embedding, F teacher features, G patches.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip.model import CLIP
from torch import Tensor
from torch.nn import functional

from runner.results import write_json
from shards.catalogue import CATALOGUE
from shards.rng import generator
from shards.world.generate import Style
from tools.record import describe_run
from tools.train_mini import model as mini
from tools.train_mini import teacher as pictures
from tools.train_mini.model import MiniRecipe, Student, Vocabulary
from tools.train_mini.muon import Muon
from tools.train_mini.teacher import FAMILY_NAMES, Pool, Teacher

FAMILIES_PER_STEP = 2
CAPTIONS_PER_STEP = 12
STYLES: tuple[Style, ...] = ("plain", "own")
REPORT_SECONDS = 240


class Prompts:
    """Class prompts of every family and template, and captions, as compact ids made once."""

    def __init__(self, words: Vocabulary, pool: Pool) -> None:
        self.templates = {name: [*mini.phrases(name), *mini.PHRASES] for name in FAMILY_NAMES}
        self.classes = {
            name: [words.ids([t.format(c) for c in CATALOGUE[name].classnames]) for t in self.templates[name]]
            for name in FAMILY_NAMES
        }
        texts = sorted(set(pool.captions))
        position = {text: k for k, text in enumerate(texts)}
        self.captions = words.ids(texts)
        self.caption_of = torch.tensor([position[text] for text in pool.captions])

    def draw(self, family: str, rng: torch.Generator) -> Tensor:
        """Return all classes of one family with one random template."""
        own, count = len(mini.phrases(family)), len(self.templates[family])
        low, high = (0, own) if torch.rand((), generator=rng) < 0.5 else (own, count)
        index = torch.randint(low, high, (), generator=rng)
        return self.classes[family][int(index)]


def pad_to(ids: list[Tensor]) -> Tensor:
    """Concatenate tensors of different L to one [N, L], padded with row 0."""
    length = max(part.shape[1] for part in ids)
    return torch.cat([functional.pad(part, (0, length - part.shape[1])) for part in ids])


def step_loss(
    student: Student, teacher: Teacher, pool: Pool, prompts: Prompts, recipe: MiniRecipe, rng: torch.Generator
) -> dict[str, Tensor]:
    """Compute the loss of a batch of several families: classes of a family, captions of the batch, dense targets."""
    chosen = torch.randperm(len(FAMILY_NAMES), generator=rng)[:FAMILIES_PER_STEP].tolist()
    share = math.ceil(recipe.batch / FAMILIES_PER_STEP)
    drawn = [f * recipe.per_family + torch.randint(recipe.per_family, (share,), generator=rng) for f in chosen]
    rows = torch.cat(drawn)
    images, masks = pictures.batch_tensor(pool, rows.numpy(), rng)
    features, dense = student.losses(images, masks, teacher)
    few = torch.randperm(len(rows), generator=rng)[:CAPTIONS_PER_STEP]
    captions, caption_at = prompts.caption_of[rows[few]].unique(return_inverse=True)
    parts = [prompts.draw(FAMILY_NAMES[f], rng) for f in chosen] + [prompts.captions[captions]]
    texts = mini.encode_text(student.clip, pad_to(parts)).split([len(part) for part in parts])
    scale = student.clip.logit_scale.clamp(max=math.log(100)).exp()
    labels = torch.from_numpy(pool.label[rows.numpy()])
    pairs = zip(features.split(share), texts[:-1], labels.split(share), strict=True)
    by_class = [functional.cross_entropy(scale * images @ classes.T, label) for images, classes, label in pairs]
    by_caption = functional.cross_entropy(scale * features[few] @ texts[-1].T, caption_at)
    return {"class": torch.stack(by_class).mean(), "caption": by_caption, "dense": dense}


@torch.no_grad()
def zero_shot(model: CLIP, pool: Pool, words: Vocabulary) -> dict[str, dict[str, float]]:
    """Measure accuracy in per cent of each family over all, base and novel classes with the family's template."""
    model.eval()
    batches = np.split(np.arange(len(pool)), range(128, len(pool), 128))
    images = [model.visual(pictures.batch_tensor(pool, rows, None)[0])[0] for rows in batches]
    features = functional.normalize(torch.cat(images), dim=-1)
    report = {}
    for index, name in enumerate(FAMILY_NAMES):
        family = CATALOGUE[name]
        texts = mini.encode_text(model, words.ids([family.template.format(c) for c in family.classnames]))
        of_family = torch.from_numpy(pool.family == index)
        logits, labels = features[of_family] @ texts.T, torch.from_numpy(pool.label)[of_family]
        half = math.ceil(len(family.classnames) / 2)
        base = labels < half
        right = {
            "all": logits.argmax(1) == labels,
            "base": logits[base, :half].argmax(1) == labels[base],
            "novel": logits[~base, half:].argmax(1) + half == labels[~base],
        }
        report[name] = {key: round(100 * float(value.float().mean()), 1) for key, value in right.items()}
    model.train()
    return report


def make_optimizers(student: Student, recipe: MiniRecipe) -> tuple[Muon, torch.optim.AdamW]:
    """Make Muon for the matrices of the blocks, AdamW for the rest; vectors have no weight decay."""
    named = list(student.named_parameters())
    blocks = [p for name, p in named if p.ndim == 2 and "resblocks" in name]
    matrices = [p for name, p in named if p.ndim > 1 and "resblocks" not in name]
    vectors = [p for _, p in named if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
    return Muon(blocks, recipe.matrix_rate), torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), fused=True)


def rate_at(done: float) -> float:
    """Return the learning rate's factor: warm-up over the first hundredth, constant, linear decay from the middle."""
    return min(0.05 + done / 0.01, 1.0, max(0.01, (1 - done) / 0.5))


@dataclass
class Progress:
    """The state of a training: what a checkpoint contains in addition to weights and optimizer states."""

    step: int = 0
    layers: int = 0
    elapsed: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """Train mini; can be stopped at any report and continued from `file`."""

    def __init__(self, recipe: MiniRecipe, words: Vocabulary, file: Path) -> None:
        self.recipe, self.file = recipe, file
        saved: dict[str, Any] = torch.load(file, weights_only=True) if file.exists() else {}
        self.progress = Progress(**saved.get("progress", {"layers": recipe.shallow}))
        self.student = Student(mini.build(recipe, len(words.rows), self.progress.layers), recipe)
        self.optimizers = make_optimizers(self.student, recipe)
        if saved:
            self.student.load_state_dict(saved["student"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)

    def save(self) -> None:
        """Write the checkpoint under a temporary name, then rename it."""
        state = {"progress": asdict(self.progress), "student": self.student.state_dict()}
        partial = self.file.with_suffix(".partial")
        torch.save(state | {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}, partial)
        os.replace(partial, self.file)

    def grow(self) -> None:
        """Double the layers; the optimizers keep their state of the old ones."""
        mini.deepen(self.student.clip)
        self.progress.layers *= 2
        known = {weight: state for optimizer in self.optimizers for weight, state in optimizer.state.items()}
        self.optimizers = make_optimizers(self.student, self.recipe)
        for optimizer in self.optimizers:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            optimizer.state.update({weight: known[weight] for weight in weights if weight in known})

    def step(self, losses: dict[str, Tensor], done: float) -> None:
        """Take one step at the learning rate of the share `done` of the whole."""
        for optimizer, rate in zip(self.optimizers, (self.recipe.matrix_rate, self.recipe.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at(done)
        self.student.zero_grad(set_to_none=True)
        (losses["class"] + 0.5 * losses["caption"] + losses["dense"]).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.progress.step += 1


def train(recipe: MiniRecipe, work: Path, out: Path, log: Path) -> None:
    """Run the whole training; stops at `recipe.images` or after `recipe.minutes`, whichever comes first."""
    pool = pictures.cached_pool(work, recipe.per_family, recipe.seed)
    teacher = pictures.train_teacher(pool, work / "teacher.pt", recipe.seed, recipe.teacher_images)
    words = mini.vocabulary(pool)
    prompts = Prompts(words, pool)
    held_out = {style: pictures.draw_pool(240, "test", style, 0, with_captions=False) for style in STYLES}
    training = Training(recipe, words, work / "checkpoint.pt")
    progress, clip = training.progress, training.student.clip
    started, reported = time.monotonic() - progress.elapsed, time.monotonic()
    sums: dict[str, float] = {}
    done = 0.0
    while done < 1:
        progress.elapsed = time.monotonic() - started
        done = max(progress.step * recipe.batch / recipe.images, progress.elapsed / 60 / recipe.minutes)
        if progress.layers < recipe.shallow * 2 ** sum(done >= point for point in recipe.deepen_at):
            training.grow()
        if done < 1:
            rng = generator(recipe.seed, "step", progress.step)
            losses = step_loss(training.student, teacher, pool, prompts, recipe, rng)
            training.step(losses, done)
            for name, value in losses.items():
                sums[name] = 0.98 * sums.get(name, float(value.detach())) + 0.02 * float(value.detach())
        if done >= 1 or time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            progress.curve.append(report(training, sums, {s: zero_shot(clip, held_out[s], words) for s in STYLES}))
            training.save()
            mini.save_weights(clip, words, recipe, out)
    record = {"threads": torch.get_num_threads(), "recipe": asdict(recipe), "layers": progress.layers}
    write_json(log, describe_run("train_mini", None) | record | {"bytes": out.stat().st_size, "curve": progress.curve})


def report(training: Training, losses: dict[str, float], scores: dict[Style, Any]) -> dict[str, Any]:
    """Record one point of the training curve and print it."""
    progress, batch = training.progress, training.recipe.batch
    short = " ".join(f"{style} {np.mean([score['all'] for score in scores[style].values()]):.1f} %" for style in scores)
    minutes = round(progress.elapsed / 60, 1)
    print(f"{progress.step * batch} images, {minutes} min, {progress.layers} layers: {losses} {short}", flush=True)
    point = {"images": progress.step * batch, "minutes": minutes, "layers": progress.layers}
    return point | {"losses": {name: round(value, 4) for name, value in losses.items()}, "zero_shot": scores}


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the embedded CLIP on the generated world.")
    parser.add_argument("--out", type=Path, default=Path("procap/weights/mini.safetensors"), help="file of the weights")
    parser.add_argument("--log", type=Path, default=Path("docs/results/train_mini.json"), help="file of the record")
    parser.add_argument("--work", type=Path, default=Path("build/mini"), help="pictures, teacher and checkpoint")
    parser.add_argument("--minutes", type=float, default=MiniRecipe.minutes, help="stop after so long")
    parser.add_argument("--images", type=int, default=MiniRecipe.images, help="stop after so many pictures")
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    recipe = MiniRecipe(images=arguments.images, minutes=arguments.minutes)
    train(recipe, arguments.work, arguments.out, arguments.log)


if __name__ == "__main__":
    main()
