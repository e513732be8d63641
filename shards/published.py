"""The fifteen published data sets."""

from __future__ import annotations

from shards.dataset import Dataset

PUBLISHED: tuple[Dataset, ...] = ()
