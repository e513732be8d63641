"""Load a frozen CLIP by its name and weights; open_clip builds every model but `mini`.

Nothing is downloaded unless HF_HUB_OFFLINE is 0, as `--download` sets it; random weights have the name "random".
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from procap.clip import CLIP, ImagePreparation, describe_differences
from procap.errors import UsageError, UserError, unknown_name
from procap.hub import hub_file
from procap.towers import OpenClipTower
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

CONFIG_FILE = "open_clip_config.json"
"""The configuration in open_clip's format, beside the weights."""

WeightsKey = tuple[str, str | None, tuple[int, int, int, int] | None]
"""Name, weights, and the state of their file: inode, size and times of change."""


@dataclass(frozen=True)
class WeightsSource:
    """Where the weights of a backbone come from.

    pretrained: a tag, a path, "embedded" or "random". file: None for random weights.
    model: what open_clip builds, an architecture or `local-dir:FOLDER`; "" for `mini` and files with a configuration.
    config: the configuration of the model, empty if it is in the file.
    settings: how images are prepared, and the activation, by the names of open_clip.
    unknown: which of the settings nothing tells for a file.
    """

    name: str
    pretrained: str
    file: Path | None
    model: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    unknown: str = ""


def find_source(name: str, pretrained: str | None) -> WeightsSource:
    """Find the weights that `load_clip` takes, without reading them.

    Raises UsageError for an unknown name, UserError for weights that are not on this machine.
    """
    architecture = named_architecture(name, pretrained)
    source = _architecture_source(architecture, pretrained) if architecture else _source_with_config(name)
    if source.file and not source.file.is_file():
        hint = ", a folder: name the file in it, or the folder as --backbone" if source.file.is_dir() else ""
        raise UserError(f"no weights file at {pretrained if source.pretrained == pretrained else source.file}{hint}")
    return source


def _source_with_config(name: str) -> WeightsSource:
    """Find a file, a folder or a model on the Hub, which have a configuration."""
    path = Path(name).expanduser()
    if name.startswith(HUB):
        repository = name.removeprefix(HUB)
        path = _hub_file(repository, CONFIG_FILE).parent
        # Only fetched here: the weights come to the folder of the configuration, where they are looked for below.
        _hub_file(repository, *WEIGHTS_FILES)
    if not path.is_dir():
        return WeightsSource(path.stem, str(path), path)
    content = _read_config(path / CONFIG_FILE)
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
    weights, unknown = None, ""
    if tag in published:
        repository, _, file = settings.get("hf_hub", "").rpartition("/")
        weights = _hub_file(repository, *([file] if file else WEIGHTS_FILES)) if repository else EMBEDDED
    elif names_file(tag):
        weights, settings = Path(tag).expanduser(), {**settings, "quick_gelu": False}
        if (beside := weights.with_name(CONFIG_FILE)).is_file():
            content = _read_config(beside)
            settings |= {"quick_gelu": content["model_cfg"].get("quick_gelu"), **content.get("preprocess_cfg", {})}
        else:
            unknown = _unknown_settings(architecture)
    elif tag != "random":
        known = ", ".join([*published, "random, or a checkpoint's path"])
        raise unknown_name(f"weights of {architecture}", tag, [*published, "random"], listing=f"known: {known}")
    if architecture == "mini":
        return WeightsSource(architecture, tag, weights, "", model_configs()["mini"], settings)
    import open_clip

    config = open_clip.get_model_config(architecture)
    return WeightsSource(architecture, tag, weights, architecture, config, settings, unknown)


def _unknown_settings(architecture: str) -> str:
    """Name the settings that published weights of an architecture differ in and a bare file of them does not tell."""
    variants = [architecture, f"{architecture}-quickgelu"]
    has_variants = variants[1] in model_configs()
    tags = [settings for name in variants[: 1 + has_variants] for settings in published_weights(name).values()]
    images = {tuple(map(str, map(settings.get, ("mean", "std", "interpolation", "resize_mode")))) for settings in tags}
    names = ["activation (GELU or QuickGELU)"] * has_variants + ["mean, deviation and resize mode"] * (len(images) > 1)
    return " and ".join(names)


def _read_config(file: Path) -> dict[str, Any]:
    """Read a configuration in open_clip's format. Raises UserError for a file that is none."""
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no regular file")
        content: dict[str, Any] = json.loads(file.read_bytes())
        return {"preprocess_cfg": {}, **content, "model_cfg": dict(content["model_cfg"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} is no configuration of open_clip ({error})") from error


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
        allow = "allow the download with --download (in Python HF_HUB_OFFLINE=0), or " * is_offline
        page = f"https://huggingface.co/{repository}"
        elsewhere = f"{allow}download the weights from {page} elsewhere and name them with --pretrained FILE"
        raise UserError(f"{error}; {elsewhere}") from error


def load_clip(name: str = "mini", pretrained: str | None = None) -> CLIP:
    """Load a frozen CLIP, float32, on the CPU.

    name: "mini" (embedded), an architecture of open_clip ("ViT-B-16", also written "ViT-B/16"), a safetensors file with
        its configuration, or a folder or "hf-hub:ORGANIZATION/MODEL" in open_clip's format.
    pretrained: a tag of that architecture (default "openai" if it exists), a checkpoint's path, or "random".

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
    about: dict[str, Any] = {"name": source.name, "pretrained": source.pretrained}
    about["preparation"] = _image_preparation(source.settings)
    try:
        if len(plain) < 2:
            model = _build(source, state, quick_gelu)
            state = model.state_dict()
            if "image" not in plain:
                about["visual"] = OpenClipTower(model.visual)
            if "text" not in plain:
                has_tokenizer = config["text_cfg"].get("hf_tokenizer_name")
                about["text"] = OpenClipTower(model.text, source.model if has_tokenizer else "")
        elif source.file is None:
            return CLIP.random(geometry, **about)
        # CoCa's decoder writes captions.
        unused = ("text_decoder.", *[f"{tower}." for tower in ("visual", "text") if tower in about])
        plain_state = {name: weight for name, weight in state.items() if not name.startswith(unused)}
        clip = CLIP.from_state(plain_state, geometry, **about)
    except ValueError as error:
        raise UserError(f"{source.file} does not fit {source.name}: it {error}") from None
    # Only now: a file that does not fit has other problems.
    if source.unknown and not declared:
        raise UsageError(
            f"{source.file} does not tell its {source.unknown}, in which weights of {source.name} differ: put its "
            f'{CONFIG_FILE} in the same folder, such as {{"model_cfg": {{"quick_gelu": false}}}}, or name QuickGELU by '
            f"--backbone {source.name.removesuffix('-quickgelu')}-quickgelu"
        )
    return clip


def _image_preparation(settings: Mapping[str, Any]) -> ImagePreparation:
    """Read open_clip's settings of images; what they do not name is CLIP's own."""
    fields: dict[str, Any] = {name: tuple(settings[name]) for name in ("mean", "std") if name in settings}
    fields |= {"interpolation": settings["interpolation"]} if "interpolation" in settings else {}
    return ImagePreparation(**fields, squash=settings.get("resize_mode") == "squash")


def _build(source: WeightsSource, state: dict[str, Tensor], quick_gelu: bool) -> Any:
    """Build a model with the weights `state`, random ones if it is empty; ValueError if they do not fit."""
    import open_clip
    from open_clip.convert import convert_state_dict

    # open_clip logs that the weights are random.
    logging.disable(logging.WARNING)
    try:
        # The global random state stays untouched.
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would also seed every GPU, whose state is not restored behind the block.
            torch.default_generator.manual_seed(0)
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
def file_digest(key: WeightsKey) -> str:
    """Return the SHA-256 of the file of a `weights_key`, without loading it; of weights without a file their digest."""
    if (path := find_source(*key[:2]).file) is None:
        return _digest(key)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def _digest(key: WeightsKey) -> str:
    return load_clip(*key[:2]).digest()
