"""Inputs of the figures in tests/public_code/, which were measured on the public code of each method in float32.

Every array follows from numpy's PCG64, so any machine makes the same inputs: a small CLIP (widths as in ViT-B/16, four
blocks of each tower or more, 32-pixel images), five images, and the values of a method's parameters. The figures of a
method are logits, loss terms, and of every gradient the first 64 elements and the norm.
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from procap.clip import CLIP
from procap.geometry import Geometry
from procap.methods import build_method, public
from procap.text import LabelSpace
from shards.catalogue import CATALOGUE

FIGURES = Path(__file__).with_name("public_code")
CLASSNAMES = (
    "annual_crop", "River", "sea or lake", "black-and-white colobus", "Boeing 737-800", "pasture",
    "a very long class name that keeps going", "dog", "mille-feuille",
)  # fmt: skip
LABELS = torch.tensor([0, 3, 8, 3, 6])
NAMES = {
    "TipAdapter": {"keys": "adapter.weight"},
    "TipAdapterF": {"keys": "adapter.weight"},
    "GDA": {}, "SSText": {}, "CrossModal": {}, "ProLIP": {},
    "LPPP": {"rows": "classifier.weight", "bias": "classifier.bias", "alpha": "alpha_vec"},
    "DPC": {"context": "tuned_ctx"},
    "AAPL": {"context": "learnable_attr", "meta_net.0": "meta_net.linear1", "meta_net.2": "meta_net.linear2"},
    "ReBaPL": {"context": "ctx", "projection": "proj", "deep_context": "compound_prompts_text",
               "deep_projection": "compound_prompt_projections"},
}  # fmt: skip
"""Names in the figures of methods without public checkpoints: of parameters, or of their first parts."""
HEAD = 64
"""Elements of a gradient that are compared one by one."""

VISION, TEXT, EMBED = 768, 512, 512


def images(count=5, seed=11):
    return torch.from_numpy(draws(seed).standard_normal((count, 3, 32, 32), dtype=np.float32))


def draws(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def walk(shapes, std, seed=13, key=None):
    """Draw the tensors in the order of their names, sorted by `key`, from one generator, as N(0, std(name)^2)."""
    source = draws(seed)
    return {
        name: torch.from_numpy(source.standard_normal(shapes[name], dtype=np.float32) * np.float32(std(name)))
        for name in sorted(shapes, key=key)
    }


@cache
def small_clip(layers: int = 4, embed: int = EMBED, seed: int = 7, scale: float = 100.0) -> CLIP:
    """Build the CLIP of the figures, or another one as a teacher."""
    source = draws(seed)

    def normal(*shape: int, std: float) -> NDArray[np.float32]:
        values: NDArray[np.float32] = source.standard_normal(shape, dtype=np.float32) * np.float32(std)
        return values

    def norm(width: int, name: str) -> dict[str, NDArray[np.float32]]:
        return {f"{name}.weight": 1 + normal(width, std=0.1), f"{name}.bias": normal(width, std=0.1)}

    def blocks(width: int, tower: str) -> dict[str, NDArray[np.float32]]:
        state = {}
        for layer in range(layers):
            name = f"{tower}.transformer.resblocks.{layer}."
            state[f"{name}attn.in_proj_weight"] = normal(3 * width, width, std=width**-0.5)
            state[f"{name}attn.in_proj_bias"] = normal(3 * width, std=0.02)
            state[f"{name}attn.out_proj.weight"] = normal(width, width, std=width**-0.5)
            state[f"{name}attn.out_proj.bias"] = normal(width, std=0.02)
            state |= norm(width, f"{name}ln_1")
            state[f"{name}mlp.c_fc.weight"] = normal(4 * width, width, std=width**-0.5)
            state[f"{name}mlp.c_fc.bias"] = normal(4 * width, std=0.02)
            state[f"{name}mlp.c_proj.weight"] = normal(width, 4 * width, std=(4 * width) ** -0.5)
            state[f"{name}mlp.c_proj.bias"] = normal(width, std=0.02)
            state |= norm(width, f"{name}ln_2")
        return state

    state = {
        "visual.class_embedding": normal(VISION, std=0.1),
        "visual.positional_embedding": normal(17, VISION, std=0.1),
        "visual.proj": normal(VISION, embed, std=VISION**-0.5),
        "visual.conv1.weight": normal(VISION, 3, 8, 8, std=0.05),
    }
    state |= norm(VISION, "visual.ln_pre") | norm(VISION, "visual.ln_post")
    state |= blocks(VISION, "visual") | blocks(TEXT, "text")
    state["text.positional_embedding"] = normal(77, TEXT, std=0.05)
    state["text.text_projection"] = normal(TEXT, embed, std=TEXT**-0.5)
    state["logit_scale"] = np.log(np.float32(scale)).reshape(())
    state["text.token_embedding.weight"] = normal(49408, TEXT, std=0.2)
    state |= norm(TEXT, "text.ln_final")
    geometry = Geometry(32, 8, VISION, layers, 12, TEXT, layers, 8, 77, 49408, embed, quick_gelu=True)
    return CLIP.from_state({name: torch.from_numpy(np.asarray(array)) for name, array in state.items()}, geometry)


def build(name, template="a photo of a {}.", dataset="", classnames=CLASSNAMES, clip=None, **options):
    """Build a method on the CLIP of the figures or another one, by default for their classes."""
    space = LabelSpace(classnames, template, dataset=dataset)
    return build_method(name, clip or small_clip(), space, options, torch.Generator().manual_seed(0))


def novel_space(method, figures):
    return replace(method.space, classnames=tuple(map(str, figures["novel_classnames"])))


def condense(gradient: NDArray[np.float32]) -> NDArray[np.float32]:
    """Keep the first elements of a gradient and, behind them, its norm."""
    flat = gradient.ravel()
    return np.append(flat[:HEAD], np.linalg.norm(flat.astype(np.float64))).astype(np.float32)


def public_parameters(method):
    """Return the parameters by their names in the figures; `fit` gives Tip-Adapter its own."""
    names = NAMES.get(type(method).__name__)
    return public.public_parameters(method) if names is None else {
        name.replace(ours, theirs, 1): parameter
        for name, parameter in method.named_parameters()
        for ours, theirs in names.items()
        if f"{name}.".startswith(f"{ours}.")
    }  # fmt: skip


def load_public(method, tensors):
    """Set the parameters to tensors under their names in the figures."""
    parameters = public_parameters(method)
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            # LP++'s factors are a row there: a row in front fits both.
            parameter[None].copy_(tensors[name])


def shapes_of(method):
    return {name: tuple(parameter.shape) for name, parameter in public_parameters(method).items()}


def load_drawn(method, std):
    """Set the parameters to draws of the size std(name, shape)."""
    shapes = shapes_of(method)
    load_public(method, walk(shapes, lambda name: std(name, shapes[name])))


def load_maple(method, seed=13):
    """Set the parameters of MaPLe to draws in the order of its figures, block by block."""

    def key(name):
        return "compound" in name, re.findall(r"\d", name), "proj" in name, name.endswith("bias")

    load_public(method, walk(shapes_of(method), lambda name: 0.04 if "proj" in name else 0.1, seed, key))


def take_steps(engine, batches, rate, losses):
    """Train on batches, whose terms or their sum equal the losses; yields each step and its terms before the update.

    rate: of all steps, or one for each.
    """
    rates = np.broadcast_to(rate, len(losses)).tolist()
    for step, (batch, rate, loss) in enumerate(zip(batches, rates, losses, strict=True)):
        engine.set_recipe_rate(rate)
        terms = engine.terms(batch)
        near(terms.detach() if np.ndim(loss) else terms.detach().sum(), loss)
        engine.backward(terms)
        yield step, terms.detach()
        engine.update()


def by_dataset(lines):
    """Read lines such as "EuroSAT=a centered satellite photo of {}." to templates by our names of data sets."""
    names = {name.replace("-", ""): name for name in CATALOGUE} | {"describabletextures": "dtd"}
    pairs = (line.split("=", 1) for line in lines.tolist())
    return {names[dataset.lower()]: template for dataset, template in pairs}


def figures_of(name):
    return np.load(FIGURES / f"{name}.npz")


def near(ours, theirs, tolerance=2e-5, largest=None):
    """Compare arrays, relative to their largest element, or to `largest` for parts of an array."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= tolerance * (largest or np.abs(theirs).max())


def near_condensed(tensor, theirs, tolerance=2e-5, like=None):
    """Compare a tensor with its first elements and norm, relative to `like`, by default to itself."""
    ours, largest = condense(tensor.detach().numpy()), float((tensor if like is None else like).detach().abs().max())
    near(ours[:-1], theirs[:-1], tolerance, largest)
    near(ours[-1:], theirs[-1:], tolerance)
