"""Data: the catalogue of data sets, packing into WebDataset shards, and reading them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import webdataset


def pipeline(name: str, split: str = "train", root: str = "") -> webdataset.WebDataset:
    """Open a packed split as a `webdataset.WebDataset` that reads its shards from start to end.

    root: folder or URL of packed data sets (default: `$PROCAP_DATA`, else `data` in the cache). Samples are undecoded;
    shards are dealt to the processes of torch.distributed and the workers of a DataLoader, and each is verified when it
    was read: one that is not what was packed raises UserError.

        for image, label in pipeline("shapes", "test").decode("pil").to_tuple("webp;png;jpg", "cls"):
            ...
    """
    from shards.default_paths import data_root
    from shards.reader import open_dataset

    return open_dataset(data_root(root), name, remote=True).pipeline(split)
