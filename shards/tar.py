"""WebDataset tars: the members that packing writes for an image, and a check that a tar holds those members.

Members of a sample lie side by side in alphabetical order and share their name up to the first dot: `s0000008.cls`
(label), `s0000008.json` (path), `s0000008.png` (image). Members are never extracted to the disk.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from shards.names import unsafe_path

# Extensions that WebDataset readers treat as images. Others can be dangerous: a library that decodes members by
# extension would unpickle a `pyd`.
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "tiff")

# Largest image, in bytes.
IMAGE_LIMIT = 2**32 - 1

# Largest header or side member, in bytes; a larger one is refused before it is read.
HEADER_LIMIT = 2**20

SAMPLE_KEY = re.compile(r"s[0-9]{7,18}")


def sample_key(position: int) -> str:
    """Return the member name of the image at `position` of its split."""
    return f"s{position:07d}"


def tar_sample(key: str, path: str, label: int, data: bytes, extension: str) -> dict[str, str | bytes]:
    """Make the sample that webdataset's TarWriter writes for an image. Raises ValueError if it cannot be stored."""
    if extension not in IMAGES:
        raise ValueError(f"its name does not end as an image's does ({', '.join(IMAGES)})")
    if reason := unsafe_path(path):
        raise ValueError(f"its name {reason}")
    if len(data) > IMAGE_LIMIT:
        raise ValueError("it is larger than 4 GiB")
    side = json.dumps({"path": path}, ensure_ascii=False).encode()
    return {"__key__": key, "cls": str(label).encode(), "json": side, extension: data}


def image_offset(sample: Mapping[str, str | bytes], extension: str, start: int) -> int:
    """Compute the offset of the image of a `tar_sample` in a tar in which the sample begins at byte `start`."""
    for name in sorted(sample.keys() - {"__key__"}):
        start += tarfile.BLOCKSIZE
        if name == extension:
            break
        start += -(-len(sample[name]) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return start


def member_problem(file: Path, samples: Iterable[tuple[str, str, int, int, int]]) -> str | None:
    """Describe a tar that does not hold the samples that packing writes, in words that follow its name.

    samples: key, path and label of each image, and its offset and size in the tar. Images are not read.
    """
    try:
        with _TarFile(io.FileIO(file)) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for key, path, label, offset, size in samples:
                members = {member.name: member for _ in range(3) if (member := tar.next()) and member.isreg()}
                expected = tar_sample(key, path, label, b"", IMAGES[0])
                for name in ("cls", "json"):
                    content = expected[name]
                    member = members.pop(f"{key}.{name}", None)
                    stored = tar.extractfile(member) if member and member.size == len(content) else None
                    if stored is None or stored.read() != content:
                        return f"has no member {key}.{name} with what the list of the split says"
                image = next(iter(members.values()), None)
                if image is None or image.name.removeprefix(f"{key}.") not in IMAGES:
                    return f"has no image of the sample {key} where it belongs"
                if (image.offset_data, image.size) != (offset, size):
                    return f"has the image {image.name} at another place than its index says"
            if extra := tar.next():
                return f"has {extra.name!r:.200}, which belongs to no image"
            stream.seek(tar.offset)
            while block := stream.read(HEADER_LIMIT):
                if block.strip(b"\0"):
                    return f"is damaged or holds more than one archive: no member begins at byte {tar.offset}"
    except (tarfile.TarError, OSError, EOFError, RecursionError, OverflowError, ValueError) as error:
        return f"is not a readable uncompressed tar ({error})"
    return None


class _TarFile(io.BufferedReader):
    """A file that limits the size of reads, because tarfile allocates whatever size a forged header claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= HEADER_LIMIT:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return super().read(size)
