"""Find and load a frozen CLIP by its name and weights.

Nothing is downloaded unless the user set HF_HUB_OFFLINE=0, and random weights come only by the name "random".
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from procap.clip import CLIP, OPENAI_MEAN, OPENAI_STD
from procap.errors import UsageError, UserError, unknown_name
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
from procap.weights.files import check_file, geometry_of, read_weights

EMBEDDED = Path(__file__).with_name("mini.safetensors")
"""The weights of `mini`, a tiny ViT CLIP trained on generated images: only the vocabulary that its training used."""


@dataclass(frozen=True)
class Source:
    """Where the weights of a backbone come from.

    pretrained: a tag, a path, "embedded" or "random".
    file: None for random weights.
    geometry: that of the architecture, with the activation of the tag; None if the file alone decides.
    """

    name: str
    pretrained: str
    file: Path | None
    geometry: Geometry | None = None
    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD


def find_source(name: str, pretrained: str | None) -> Source:
    """Find the weights that `load_clip` takes; reads none. UserError, or UsageError for an unknown name."""
    if name.lower() == "mini":
        if pretrained in (None, "embedded", "random"):
            return Source("mini", pretrained or "embedded", None if pretrained == "random" else EMBEDDED)
        if not names_file(str(pretrained)):
            known = "known: embedded, random, or a file's path"
            raise unknown_name("weights of mini", str(pretrained), ["embedded", "random"], listing=known)
        return Source("mini", str(pretrained), Path(str(pretrained)).expanduser())
    architecture = named_architecture(name, pretrained)
    if architecture is None:
        file = Path(name).expanduser()
        return Source(file.stem, str(file), file)
    geometry = geometry_from_config(model_configs()[architecture])
    if pretrained == "random":
        # Random weights replace those that a user would load, so they take their activation.
        quick_gelu = geometry.quick_gelu or "openai" in _tags(architecture)
        return Source(architecture, "random", None, replace(geometry, quick_gelu=quick_gelu))
    if tag := _tag(architecture, pretrained):
        from open_clip.pretrained import get_pretrained_cfg

        entry = get_pretrained_cfg(architecture, tag)
        geometry = replace(geometry, quick_gelu=bool(entry.get("quick_gelu", False)))
        return Source(architecture, tag, _find_file(architecture, tag, entry), geometry, entry["mean"], entry["std"])
    file = Path(str(pretrained)).expanduser()
    return Source(architecture, str(file), file, geometry)


def load_clip(name: str = "mini", pretrained: str | None = None, *, seed: int = 0) -> CLIP:
    """Load a frozen CLIP, float32, on the CPU.

    name: "mini" (embedded), an architecture of open_clip ("ViT-B-16", also written "ViT-B/16"), or a checkpoint's path.
    pretrained: a tag of that architecture (default "openai" if it exists), a checkpoint's path, or "random".
    seed: only for "random".

    The activation follows the weights: OpenAI's need QuickGELU under either name of their architecture; elsewhere tag
    and name must agree, and for a plain state dict the name alone decides.
    Raises UsageError for names and files that do not fit each other, UserError for weights that are absent or broken.
    """
    source = find_source(name, pretrained)
    file, geometry = source.file, source.geometry
    if file is None:
        return CLIP.random(geometry or load_clip("mini").geometry, seed, name=source.name, pretrained="random")
    weights = read_weights(file)
    quick_gelu = geometry.quick_gelu if geometry and not weights.openai_format else weights.quick_gelu
    if quick_gelu is None:
        raise UsageError(
            f"{file} does not say which activation it was trained with: name the architecture beside the file, "
            f"such as ViT-B-16 (GELU) or ViT-B-16-quickgelu (QuickGELU)"
        )
    if weights.quick_gelu not in (None, quick_gelu):
        raise UsageError(f"{file} was trained with the other activation: name the backbone {_twin(source.name)}")
    found = geometry_of(weights, quick_gelu, file)
    geometry = replace(geometry, quick_gelu=quick_gelu) if geometry else found
    # The shapes of weights do not tell the number of heads.
    sizes = {key: (size, vars(geometry)[key]) for key, size in vars(found).items() if not key.endswith("_heads")}
    differ = [f"{key} {size} instead of {wanted}" for key, (size, wanted) in sizes.items() if size != wanted]
    if differ:
        raise UsageError(f"{file} does not fit {source.name}: it has {', '.join(differ)}")
    about = {"name": source.name, "pretrained": source.pretrained, "image_mean": source.mean, "image_std": source.std}
    try:
        return CLIP.from_state(weights.state, geometry, **about)
    except ValueError as error:
        raise UserError(f"{file} does not fit {source.name}: it {error}") from None


@functools.cache
def weights_digest(name: str, pretrained: str | None = None) -> str:
    """Return the digest of the CLIP that `load_clip` loads, computed once per process. Raises what `load_clip` does."""
    return load_clip(name, pretrained).digest()


def weights_file(name: str, pretrained: str | None = None) -> Path | None:
    """Return the file that `load_clip` would read, or None if it needs none beside the package.

    Raises UserError if the weights are not on this machine, naming the places that were searched, UsageError for an
    unknown name. Does not read the file.
    """
    file = find_source(name, pretrained).file
    if file in (None, EMBEDDED):
        return None
    check_file(file)
    return file


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
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "procap"


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
    tags = _tags(architecture)
    if pretrained is None:
        if "openai" in tags:
            return "openai"
        known = ", ".join([*tags, "a checkpoint's path", "or 'random'"])
        raise UsageError(f"backbone '{architecture}' has no OpenAI weights: name {known}")
    tag = tag_spelling(pretrained)
    if tag in tags:
        return tag
    if names_file(pretrained):
        return None
    # Tags of the other activation, and of images squashed to a square, do not fit.
    known = f"known: {', '.join(tags)}, random, or a checkpoint's path"
    raise unknown_name(f"weights of {architecture}", pretrained, [*tags, "random"], listing=known)


def _find_file(architecture: str, tag: str, entry: Mapping[str, Any]) -> Path:
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
    raise UserError(
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
