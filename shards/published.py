"""Load the fifteen data sets of the CoOp benchmark from `published.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from shards.dataset import Dataset, PublicShards, RawLayout


def _load_published() -> tuple[Dataset, ...]:
    text = (Path(__file__).parent / "published.toml").read_text(encoding="utf-8")
    datasets = []
    for fields in tomllib.loads(text)["dataset"]:
        raw = _freeze(fields.pop("raw"))
        public = PublicShards(**raw.pop("public", {}))
        datasets.append(Dataset(**_freeze(fields), source="folder", raw=RawLayout(**raw, public=public)))
    return tuple(datasets)


def _freeze(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


PUBLISHED: tuple[Dataset, ...] = _load_published()
