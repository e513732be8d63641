"""Load a frozen CLIP by its name and weights; open_clip builds every model but `mini`.

Nothing is downloaded unless the user set HF_HUB_OFFLINE=0, and random weights come only by the name "random".
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.clip import CLIP, describe_differences
from procap.errors import UsageError, UserError, unknown_name
from procap.hub import hub_file
from procap.towers import FrozenTower
from procap.weights.architectures import (
    HUB,
    geometry_from_config,
    model_configs,
    named_architecture,
    names_file,
    plain_towers,
)
from procap.weights.files import read_weights

EMBEDDED = Path(__file__).with_name("mini.safetensors")
"""The weights of `mini`, a tiny ViT CLIP trained on generated images: only the vocabulary that its training used."""

WEIGHTS_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""The weights of a model in open_clip's format, in a folder or on the Hub."""

WeightsKey = tuple[str, str | None, tuple[int, int, int, int] | None]
"""Name, weights, and the state of their file: inode, size and times of change."""


@dataclass(frozen=True)
class WeightsSource:
    """Where the weights of a backbone come from.

    pretrained: a tag, a path, "embedded" or "random". file: None for random weights.
    model: what open_clip builds, an architecture or `local-dir:FOLDER`; "" for `mini` and files with a configuration.
    config: the configuration of the model, empty if it is in the file.
    settings: how images are prepared, and the activation, by the names of open_clip.
    """

    name: str
    pretrained: str
    file: Path | None
    model: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def find_source(name: str, pretrained: str | None) -> WeightsSource:
    """Find the weights that `load_clip` takes, without reading them.

    Raises UsageError for an unknown name, UserError for weights that are not on this machine.
    """
    architecture = named_architecture(name, pretrained)
    source = _architecture_source(architecture, pretrained) if architecture else _source_with_config(name)
    if source.file and not source.file.is_file():
        raise UserError(f"no weights file at {source.file}")
    return source


def _source_with_config(name: str) -> WeightsSource:
    """Find a file, a folder or a model on the Hub, which have a configuration."""
    path = Path(name).expanduser()
    if name.startswith(HUB):
        repository = name.removeprefix(HUB)
        path = _hub_file(repository, "open_clip_config.json").parent
        # Only fetched here: the weights come to the folder of the configuration, where they are looked for below.
        _hub_file(repository, *WEIGHTS_FILES)
    if not path.is_dir():
        return WeightsSource(path.stem, str(path), path)
    content = json.loads((path / "open_clip_config.json").read_text())
    files = [path / file for file in WEIGHTS_FILES]
    file = next(filter(Path.is_file, files), files[0])
    settings = content.get("preprocess_cfg", {})
    return WeightsSource(Path(name).name, name, file, f"local-dir:{path}", content["model_cfg"], settings)


def _architecture_source(architecture: str, pretrained: str | None) -> WeightsSource:
    """Find the weights of an architecture."""
    published = published_weights(architecture)
    default = "embedded" if architecture == "mini" else "openai"
    tag = pretrained or default
    # Random weights and files are prepared for as the usual weights of their architecture.
    settings = published.get(tag) or published.get(default) or next(iter(published.values()), {})
    weights = None
    if tag in published:
        repository, _, file = settings.get("hf_hub", "").rpartition("/")
        weights = _hub_file(repository, *([file] if file else WEIGHTS_FILES)) if repository else EMBEDDED
    elif names_file(tag):
        # The name of the architecture, or the file, decides the activation.
        weights, settings = Path(tag).expanduser(), {**settings, "quick_gelu": False}
    elif tag != "random":
        known = ", ".join([*published, "random, or a checkpoint's path"])
        raise unknown_name(f"weights of {architecture}", tag, [*published, "random"], listing=f"known: {known}")
    if architecture == "mini":
        return WeightsSource(architecture, tag, weights, "", model_configs()["mini"], settings)
    import open_clip

    return WeightsSource(architecture, tag, weights, architecture, open_clip.get_model_config(architecture), settings)


def published_weights(architecture: str) -> dict[str, dict[str, Any]]:
    """Return open_clip's settings of the published weights of an architecture by their tags."""
    if architecture == "mini":
        return {"embedded": {}}
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    return {tag: get_pretrained_cfg(architecture, tag) for tag in list_pretrained_tags_by_model(architecture)}


def _hub_file(repository: str, *names: str) -> Path:
    """Return the first of these files of a Hub repository that its cache has, or that can be downloaded."""
    # Nothing is downloaded unless the user allows it; the Hub's own default is to download.
    is_offline = os.environ.get("HF_HUB_OFFLINE") != "0"
    try:
        return hub_file(repository, *names, offline=is_offline)
    except UserError as error:
        allow = "allow the download with HF_HUB_OFFLINE=0, or " * is_offline
        page = f"https://huggingface.co/{repository}"
        elsewhere = f"{allow}download the weights from {page} elsewhere: --backbone ARCHITECTURE --pretrained FILE"
        raise UserError(f"{error}; {elsewhere}") from error


def load_clip(name: str = "mini", pretrained: str | None = None, *, seed: int = 0) -> CLIP:
    """Load a frozen CLIP, float32, on the CPU.

    name: "mini" (embedded), an architecture of open_clip ("ViT-B-16", also written "ViT-B/16"), a safetensors file with
        its configuration, or a folder or "hf-hub:ORGANIZATION/MODEL" in open_clip's format.
    pretrained: a tag of that architecture (default "openai" if it exists), a checkpoint's path, or "random".
    seed: only for "random".

    A tower that is one of CLIP's own transformers runs in `procap.towers`, every other tower by open_clip's own module.
    The activation is that of the tag, QuickGELU for OpenAI's files, and otherwise that of the name.
    Raises UsageError for names and files that do not fit each other, UserError for weights that are absent or broken.
    """
    source = find_source(name, pretrained)
    state, declared = read_weights(source.file) if source.file else ({}, {})
    # The configuration in a file counts for `mini`, and for a file that is named without an architecture.
    config = declared if "vision_cfg" in declared and not source.model else source.config
    if not config:
        raise UsageError(f"{source.file} has no configuration of its model: name the architecture next to it")
    # Weights do not tell the activation: a configuration, the file's metadata or the tag can name it.
    quick_gelu = any(values.get("quick_gelu") for values in (config, declared, source.settings))
    geometry, plain = geometry_from_config(config, quick_gelu), plain_towers(config)
    names = {"mean": "image_mean", "std": "image_std", "interpolation": "interpolation"}
    about: dict[str, Any] = {ours: source.settings[key] for key, ours in names.items() if key in source.settings}
    about |= {"name": source.name, "pretrained": source.pretrained}
    about["squash"] = source.settings.get("resize_mode") == "squash"
    try:
        if len(plain) < 2:
            model = _build(source, state, quick_gelu, seed)
            state = model.state_dict()
            if "image" not in plain:
                about["visual"] = FrozenTower(model.visual)
            if "text" not in plain:
                has_tokenizer = config["text_cfg"].get("hf_tokenizer_name")
                about["text"] = FrozenTower(model.text, source.model if has_tokenizer else "")
        elif source.file is None:
            return CLIP.random(geometry, seed, **about)
        # CoCa's decoder writes captions.
        unused = ("text_decoder.", *[f"{tower}." for tower in ("visual", "text") if tower in about])
        plain_state = {name: weight for name, weight in state.items() if not name.startswith(unused)}
        return CLIP.from_state(plain_state, geometry, **about)
    except ValueError as error:
        raise UserError(f"{source.file} does not fit {source.name}: it {error}") from None


def _build(source: WeightsSource, state: dict[str, Tensor], quick_gelu: bool, seed: int) -> Any:
    """Build a model with the weights `state`, random ones if it is empty; ValueError if they do not fit."""
    import open_clip
    from open_clip.convert import convert_state_dict

    # open_clip logs that the weights are random.
    logging.disable(logging.WARNING)
    try:
        # The global random state stays untouched.
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would also seed every GPU, whose state is not restored behind the block.
            torch.default_generator.manual_seed(seed)
            options = {"load_weights": False, "pretrained_text": False, "force_custom_text": True}
            model = open_clip.create_model(source.model, **options, quick_gelu=quick_gelu).eval()
    except (RuntimeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"open_clip cannot build {source.name}: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)
    if state:
        state = convert_state_dict(model, state)
        if problems := describe_differences(model.state_dict(), state):
            raise ValueError("; ".join(problems))
        model.load_state_dict(state)
    return model


def weights_key(name: str, pretrained: str | None = None) -> WeightsKey:
    """Return what changes whenever `load_clip` would load different weights. Raises what `find_source` does."""
    file = find_source(name, pretrained).file
    status = file.stat() if file else None
    return name, pretrained, status and (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def weights_digest(name: str, pretrained: str | None = None) -> str:
    """Return the digest of the CLIP that `load_clip` loads, computed once for a file. Raises what `load_clip` does."""
    return _digest(weights_key(name, pretrained))


@functools.cache
def _digest(key: WeightsKey) -> str:
    return load_clip(*key[:2]).digest()
