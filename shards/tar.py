"""WebDataset tars: the members that packing writes for an image.

Members of a sample lie side by side in alphabetical order and share their name up to the first dot: `s0000008.cls`
(label), `s0000008.json` (path), `s0000008.png` (image). Members are never extracted to the disk.
"""

from __future__ import annotations

import io
import json
import re
import tarfile

from shards.names import unsafe_path
from shards.records import ImageRecord

# Extensions that WebDataset readers treat as images. Others can be dangerous: a library that decodes members by
# extension would unpickle a `pyd`.
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")

# Largest image, in bytes.
IMAGE_LIMIT = 2**32 - 1

SAMPLE_KEY = re.compile(r"s[0-9]{7,18}")


def sample_key(position: int) -> str:
    """Return the member name of the image at `position` of its split."""
    return f"s{position:07d}"


def add_image(archive: tarfile.TarFile, key: str, record: ImageRecord) -> int:
    """Add the members of an image, and return the offset of its bytes. Raises ValueError if it cannot be stored."""
    if record.extension not in IMAGES:
        raise ValueError(f"its name does not end as an image's does ({', '.join(IMAGES)})")
    if reason := unsafe_path(record.path):
        raise ValueError(f"its name {reason}")
    if len(record.data) > IMAGE_LIMIT:
        raise ValueError("it is larger than 4 GiB")
    side = json.dumps({"path": record.path}, ensure_ascii=False).encode()
    offset, members = 0, {"cls": str(record.label).encode(), "json": side, record.extension: record.data}
    for name, content in sorted(members.items()):
        member = tarfile.TarInfo(f"{key}.{name}")
        # The owner and rights that webdataset's TarWriter gives, which would import torch in every process that packs.
        member.size, member.mode, member.uname, member.gname = len(content), 0o444, "bigdata", "bigdata"
        if name == record.extension:
            offset = archive.offset + tarfile.BLOCKSIZE
        archive.addfile(member, io.BytesIO(content))
    return offset
