"""Find and load a frozen CLIP by its name and weights.

Nothing is downloaded unless the user set HF_HUB_OFFLINE=0, and random weights come only by the name "random".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from procap.clip import CLIP, OPENAI_MEAN, OPENAI_STD
from procap.errors import MissingWeights, UsageError, UserError, unknown_name
from procap.geometry import Geometry
from procap.weights.architectures import (
    SUFFIXES,
    geometry_from_config,
    model_configs,
    named_architecture,
    names_file,
    supported_architectures,
    tag_spelling,
)
from procap.weights.files import Weights, check_file, geometry_of, read_weights
from procap.weights.mini import load_mini


def load_clip(name: str = "mini", pretrained: str | None = None, *, seed: int = 0) -> CLIP:
    """Load a frozen CLIP, float32, on the CPU.

    name: "mini" (embedded), an architecture of open_clip ("ViT-B-16", also written "ViT-B/16"), or a checkpoint's path.
    pretrained: a tag of that architecture (default "openai" if it exists), a checkpoint's path, or "random".
    seed: only for "random".

    The activation follows the weights: OpenAI's need QuickGELU under either name of their architecture; elsewhere tag
    and name must agree, and for a plain state dict the name alone decides.
    Raises UsageError for names and files that do not fit each other, UserError for weights that are absent or broken.
    """
    if name.lower() == "mini":
        return _load_mini(pretrained, seed)
    from open_clip.pretrained import get_pretrained_cfg

    architecture = named_architecture(name, pretrained)
    if architecture is None:
        path = Path(name).expanduser()
        weights = read_weights(path)
        if weights.quick_gelu is None:
            raise UsageError(
                f"{path} does not say which activation it was trained with: name the architecture beside the file, "
                f"such as ViT-B-16 (GELU) or ViT-B-16-quickgelu (QuickGELU)"
            )
        return _build(weights, geometry_of(weights, weights.quick_gelu, path), path.stem, path)
    geometry = geometry_from_config(model_configs()[architecture])
    if pretrained == "random":
        return CLIP.random(geometry, seed, name=architecture, pretrained="random")
    if tag := _tag(architecture, pretrained):
        entry = get_pretrained_cfg(architecture, tag)
        path = _find_weights(architecture, tag, entry)
        geometry = replace(geometry, quick_gelu=bool(entry.get("quick_gelu", False)))
        return _build(read_weights(path), geometry, architecture, path, tag, entry["mean"], entry["std"])
    path = Path(str(pretrained)).expanduser()
    weights = read_weights(path)
    if weights.openai_format:
        geometry = replace(geometry, quick_gelu=True)
    elif weights.quick_gelu not in (None, geometry.quick_gelu):
        raise UsageError(f"{path} was trained with the other activation: name the backbone {_twin(architecture)}")
    return _build(weights, geometry, architecture, path)


def weights_file(name: str, pretrained: str | None = None) -> Path | None:
    """Return the file that `load_clip` would read, or None if it needs none.

    Raises UserError if the weights are not on this machine, naming the places that were searched, UsageError for an
    unknown name. Does not read the file.
    """
    if pretrained == "random" or (name.lower() == "mini" and pretrained in (None, "embedded")):
        return None
    if name.lower() == "mini":
        file = _mini_file(str(pretrained))
        check_file(file)
        return file
    architecture = named_architecture(name, pretrained)
    tag = None if architecture is None else _tag(architecture, pretrained)
    if architecture is None or tag is None:
        file = Path(name if architecture is None else str(pretrained)).expanduser()
        check_file(file)
        return file
    from open_clip.pretrained import get_pretrained_cfg

    return _find_weights(architecture, tag, get_pretrained_cfg(architecture, tag))


def list_backbones() -> list[tuple[str, tuple[str, ...], str]]:
    """List (name, weight tags, note) of everything that `load_clip` accepts by name."""
    rows: list[tuple[str, tuple[str, ...], str]] = [("mini", ("embedded",), "tiny, inside the package, works offline")]
    for name in supported_architectures():
        g = geometry_from_config(model_configs()[name])
        note = f"{g.image_size} px, patch {g.patch_size}, widths {g.vision_width}/{g.text_width}"
        rows.append((name, _tags(name), note + (", QuickGELU" if g.quick_gelu else "")))
    return rows


def procap_home() -> Path:
    """Return the cache folder: $PROCAP_HOME, else $XDG_CACHE_HOME/procap, else ~/.cache/procap."""
    if home := os.environ.get("PROCAP_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "procap"


def _load_mini(pretrained: str | None, seed: int) -> CLIP:
    if pretrained in (None, "embedded"):
        return load_mini()
    if pretrained == "random":
        return CLIP.random(load_mini().geometry, seed, name="mini", pretrained="random")
    return load_mini(_mini_file(pretrained))


def _mini_file(pretrained: str) -> Path:
    if not names_file(pretrained):
        raise unknown_name("weights of mini", pretrained, ["embedded", "random", "or a file's path"])
    return Path(pretrained).expanduser()


def _build(
    weights: Weights,
    geometry: Geometry,
    name: str,
    path: Path,
    tag: str | None = None,
    mean: tuple[float, ...] = OPENAI_MEAN,
    std: tuple[float, ...] = OPENAI_STD,
) -> CLIP:
    found = geometry_of(weights, geometry.quick_gelu, path)
    # The shapes of weights do not tell the number of heads.
    sizes = {key: (size, vars(geometry)[key]) for key, size in vars(found).items() if not key.endswith("_heads")}
    differ = [f"{key} {size} instead of {wanted}" for key, (size, wanted) in sizes.items() if size != wanted]
    if differ:
        raise UsageError(f"{path} does not fit {name}: it has {', '.join(differ)}")
    try:
        return CLIP.from_state(
            weights.state, geometry, name=name, pretrained=tag or str(path), image_mean=mean, image_std=std
        )
    except ValueError as error:
        raise UserError(f"{path} does not fit {name}: it {error}") from None


def _twin(architecture: str) -> str:
    """Return open_clip's name of the same towers with the other activation."""
    plain = architecture.removesuffix("-quickgelu")
    return plain if plain != architecture else f"{plain}-quickgelu"


def _tags(architecture: str) -> tuple[str, ...]:
    """List the tags that fit: trained with this activation, on images resized by the shorter side and cropped."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    quick_gelu = bool(model_configs()[architecture].get("quick_gelu", False))
    entries = {tag: get_pretrained_cfg(architecture, tag) for tag in list_pretrained_tags_by_model(architecture)}
    return tuple(
        tag
        for tag, entry in entries.items()
        # OpenAI's weights need QuickGELU, although they are usually named by the plain architecture.
        if entry["resize_mode"] == "shortest" and (tag == "openai" or entry.get("quick_gelu", False) == quick_gelu)
    )


def _tag(architecture: str, pretrained: str | None) -> str | None:
    """Return the tag that `pretrained` names, None if it is a path."""
    from open_clip.pretrained import list_pretrained_tags_by_model

    tags = _tags(architecture)
    if pretrained is None:
        if "openai" in tags:
            return "openai"
        have = f"no OpenAI weights: name one of {', '.join(tags)}," if tags else "no published weights: name"
        raise UsageError(f"backbone '{architecture}' has {have} a checkpoint's path, or 'random'")
    tag = tag_spelling(pretrained)
    if tag in tags:
        return tag
    if names_file(pretrained):
        return None
    if tag in list_pretrained_tags_by_model(_twin(architecture)) and tag in _tags(_twin(architecture)):
        raise UsageError(f"weights '{tag}' need the other activation: name the backbone {_twin(architecture)}")
    if tag in list_pretrained_tags_by_model(architecture):
        raise UsageError(f"weights '{tag}' of {architecture} need images squashed to a square; here they are cropped")
    raise unknown_name(f"weights of {architecture}", pretrained, [*tags, "random", "or a checkpoint's path"])


def _find_weights(architecture: str, tag: str, entry: Mapping[str, Any]) -> Path:
    """Find a tag's file in the cache of this program, OpenAI's or Hugging Face's. UserError names the caches."""
    folder = procap_home() / "weights"
    candidates = [folder / f"{architecture}-{tag}{suffix}" for suffix in SUFFIXES]
    if url := entry.get("url"):
        candidates += [folder / Path(url).name, Path.home() / ".cache" / "clip" / Path(url).name]
    for path in candidates:
        if path.is_file():
            return path
    places = [f"{folder}/{architecture}-{tag}.safetensors (or .pt)"]
    if hub := entry.get("hf_hub"):
        if found := _hugging_face_file(hub):
            return found
        places.append(f"the Hugging Face cache ({hub.rstrip('/')})")
    raise MissingWeights(
        f"weights '{tag}' of {architecture} are not on this machine; looked for {' and '.join(places)}: put the "
        f"file there, name a local file with --pretrained PATH, or allow the download with HF_HUB_OFFLINE=0"
    )


def _hugging_face_file(hub: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    repository, file = os.path.split(hub)
    online = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("0", "false", "no", "off")
    for name in [file] if file else [HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME]:
        try:
            return Path(hf_hub_download(repository, name, local_files_only=not online))
        except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
            continue
    return None
