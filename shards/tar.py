"""WebDataset tars: the members that packing writes for an image.

Members of a sample lie side by side in alphabetical order and share their name up to the first dot: `s0000008.cls`
(label), `s0000008.json` (path), `s0000008.png` (image). Members are never extracted to the disk.
"""

from __future__ import annotations

import json

from procap.errors import UserError
from shards.names import unsafe_path
from shards.records import ImageRecord

# Extensions that WebDataset readers treat as images. Others can be dangerous: a library that decodes members by
# extension would unpickle a `pyd`.
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")


def sample_key(position: int) -> str:
    """Return the member name of the image at `position` of its split."""
    return f"s{position:07d}"


def make_sample(key: str, record: ImageRecord) -> dict[str, str | bytes]:
    """Make the sample that webdataset's TarWriter writes for an image. Raises UserError if it cannot be stored."""
    reason = unsafe_path(record.path)
    if record.extension not in IMAGES:
        reason = f"does not end as an image's does ({', '.join(IMAGES)})"
    if reason:
        raise UserError(f"{record.path!r} cannot be packed: its name {reason}")
    side = json.dumps({"path": record.path}, ensure_ascii=False).encode()
    return {"__key__": key, "cls": str(record.label).encode(), "json": side, record.extension: record.data}
