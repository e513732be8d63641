"""Load a frozen CLIP by its name and weights; open_clip builds every model but `mini`.

Nothing is downloaded unless the user set HF_HUB_OFFLINE=0, and random weights come only by the name "random".
"""

from __future__ import annotations

import functools
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
from procap.towers import FrozenTower
from procap.weights.architectures import (
    HUB,
    geometry_from_config,
    model_configs,
    named_architecture,
    names_file,
    plain_towers,
    tag_spelling,
)
from procap.weights.files import read_weights

EMBEDDED = Path(__file__).with_name("mini.safetensors")
"""The weights of `mini`, a tiny ViT CLIP trained on generated images: only the vocabulary that its training used."""

WEIGHTS_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""The weights of a model in open_clip's format, in a folder or on the Hub."""

WeightsKey = tuple[str, str | None, tuple[int, int, int, int] | None]
"""Name, weights, and the state of their file: inode, size and times of change."""


@dataclass(frozen=True)
class Source:
    """Where the weights of a backbone come from.

    pretrained: a tag, a path, "embedded" or "random".
    file: None for random weights.
    model: what open_clip builds, an architecture or `local-dir:FOLDER`; "" for `mini` and files with a configuration.
    settings: open_clip's of a tag: preprocessing and activation.
    """

    name: str
    pretrained: str
    file: Path | None
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def find_source(name: str, pretrained: str | None) -> Source:
    """Find the weights that `load_clip` takes, without reading them; names in any spelling.

    Raises UsageError for an unknown name, UserError for weights that are not on this machine.
    """
    architecture = named_architecture(name, pretrained)
    source = _architecture_source(architecture, pretrained) if architecture else _source_with_config(name)
    if source.file and not source.file.is_file():
        raise UserError(f"no weights file at {source.file}")
    return source


def _source_with_config(name: str) -> Source:
    """Find a file, a folder or a model on the Hub, which have a configuration."""
    path = Path(name).expanduser()
    if name.startswith(HUB):
        repository = name.removeprefix(HUB)
        path = _hub_file(repository, "open_clip_config.json").parent
        _hub_file(repository)
    if not path.is_dir():
        return Source(path.stem, str(path), path)
    files = [path / file for file in WEIGHTS_FILES]
    return Source(Path(name).name, name, next(filter(Path.is_file, files), files[0]), f"local-dir:{path}")


def _architecture_source(architecture: str, pretrained: str | None) -> Source:
    """Find the weights of an architecture."""
    published, model = _published(architecture), "" if architecture == "mini" else architecture
    default = next((tag for tag in published if tag in ("openai", "embedded")), None)
    known = ", ".join([*published, "random, or a checkpoint's path"])
    if pretrained is None and default is None:
        raise UsageError(f"backbone '{architecture}' has no OpenAI weights: name one of {known}")
    tag = tag_spelling(pretrained or str(default))
    # Random weights and files are prepared for as the usual weights of their architecture.
    usual = published.get(str(default)) or next(iter(published.values()), {})
    if tag == "random":
        return Source(architecture, tag, None, model, usual)
    if tag in published:
        settings = published[tag]
        return Source(architecture, tag, _hub_file(settings["hf_hub"]) if model else EMBEDDED, model, settings)
    if not names_file(str(pretrained)):
        options = [*published, "random"]
        raise unknown_name(f"weights of {architecture}", str(pretrained), options, listing=f"known: {known}")
    # The name of the architecture, or the file, decides the activation.
    file = Path(str(pretrained)).expanduser()
    return Source(architecture, str(pretrained), file, model, {**usual, "quick_gelu": False})


def _published(architecture: str) -> dict[str, dict[str, Any]]:
    """Return open_clip's settings of the published weights of an architecture by their tags."""
    if architecture == "mini":
        return {"embedded": {}}
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    return {tag: get_pretrained_cfg(architecture, tag) for tag in list_pretrained_tags_by_model(architecture)}


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
    config = declared if "vision_cfg" in declared or source.name != "mini" else model_configs()["mini"]
    if source.model:
        import open_clip

        config = open_clip.get_model_config(source.model)
    if "vision_cfg" not in config:
        raise UsageError(f"{source.file} has no configuration of its model: name the architecture next to it")
    quick_gelu = any(each.get("quick_gelu") for each in (config, declared, source.settings))
    geometry, plain = geometry_from_config(config, quick_gelu), plain_towers(config)
    about: dict[str, Any] = {"name": source.name, "pretrained": source.pretrained}
    try:
        if source.model:
            # Our own towers need nothing but shapes; a module that computes also has buffers, which no file holds.
            model = _build(source, quick_gelu, seed, "meta" if len(plain) == 2 else "cpu")
            about |= _about_model(model, source.model, config)
            state = _fill(model, state) if state else model.state_dict()
        if source.file is None and len(plain) == 2:
            return CLIP.random(geometry, seed, **about)
        # CoCa's decoder writes captions.
        unused = ("text_decoder.", *[f"{tower}." for tower in ("visual", "text") if tower in about])
        plain_state = {name: weight for name, weight in state.items() if not name.startswith(unused)}
        return CLIP.from_state(plain_state, geometry, **about)
    except ValueError as error:
        raise UserError(f"{source.file} does not fit {source.name}: it {error}") from None


def _build(source: Source, quick_gelu: bool, seed: int, device: str) -> Any:
    """Build a model with random weights; the global random state stays untouched."""
    import open_clip

    # open_clip logs that the weights are random.
    logging.disable(logging.WARNING)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.default_generator.manual_seed(seed)
            return open_clip.create_model(
                source.model,
                device=device,
                load_weights=False,
                pretrained_text=False,
                force_custom_text=True,
                force_preprocess_cfg=dict(source.settings),
                quick_gelu=quick_gelu,
            ).eval()
    except (RuntimeError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"open_clip cannot build {source.name}: {reason}") from error
    finally:
        logging.disable(logging.NOTSET)


def _about_model(model: Any, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `CLIP` takes from a model of open_clip: how it prepares images, and its towers that are not plain."""
    images, plain = model.visual.preprocess_cfg, plain_towers(config)
    about = {"image_mean": images["mean"], "image_std": images["std"], "interpolation": images["interpolation"]}
    about["squash"] = images["resize_mode"] == "squash"
    if "image" not in plain:
        about["visual"] = FrozenTower(model.visual)
    if "text" not in plain:
        about["text"] = FrozenTower(model.text, name if config["text_cfg"].get("hf_tokenizer_name") else "")
    return about


def _fill(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load `state` into a model that computes; returns it under the model's names. ValueError if it does not fit."""
    from open_clip.convert import convert_state_dict

    state = convert_state_dict(model, state)
    if problems := describe_differences(model.state_dict(), state):
        raise ValueError("; ".join(problems))
    if not model.logit_scale.is_meta:
        model.load_state_dict(state)
    return state


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


def list_backbones() -> list[dict[str, Any]]:
    """List name, methods that it admits, note and weight tags of everything that `load_clip` accepts by name."""
    rows = []
    for name, config in model_configs().items():
        plain, vision, text = plain_towers(config), config["vision_cfg"], config["text_cfg"]
        admitted = "all" if len(plain) == 2 else f"{plain[0]} only" if plain else "features only"
        patch = f"patch {vision['patch_size']}" if vision.get("patch_size") else "ResNet"
        model = vision.get("timm_model_name", patch)
        widths = f"{vision.get('width', '-')}/{text.get('width', '-')}"
        note = f"{vision['image_size']} px, {model}, widths {widths}" + ", QuickGELU" * config.get("quick_gelu", False)
        rows.append({"name": name, "methods": admitted, "note": note, "tags": list(_published(name))})
    return rows


def _hub_file(repository: str, file: str = "") -> Path:
    """Return a file of the Hugging Face Hub, by default the weights, from its cache or downloaded.

    repository: may end in a slash, or in a slash and the file. Raises UserError if the file is absent.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repository, file = "/".join(repository.split("/")[:2]), file or "/".join(repository.split("/")[2:])
    online = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("0", "false", "no", "off")
    for name in [file] if file else WEIGHTS_FILES:
        try:
            return Path(hf_hub_download(repository, name, local_files_only=not online))
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
            continue
    raise UserError(
        f"the Hugging Face cache has no {file or 'weights'} of {repository}: allow the download with HF_HUB_OFFLINE=0, "
        "or name an architecture and a local file with --pretrained PATH"
    )
