"""Write shards in the layout of clip-benchmark, member by member, whole or broken."""

import io
import tarfile

import numpy as np

from shards.records import png

CLASSES = ("red", "green", "blue")


def image(i: int) -> bytes:
    return png(np.full((4, 5, 3), i % 256, np.uint8))


def member(name: str, data: bytes = b"", **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def sample(key: str, label: int, data: bytes | None = None, **others: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    members = {"cls": str(label).encode(), "png": data or image(label), **others}
    return [member(f"{key}.{extension}", content) for extension, content in sorted(members.items())]


def write_tar(file, members, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", **options) as tar:  # type: ignore[call-overload]
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return file


def several(start: int, stop: int) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [part for i in range(start, stop) for part in sample(f"s{i:07d}", i % len(CLASSES), image(i))]


def layout(root, splits):
    """Write tars with the given numbers of samples for each split in `root`."""
    for split, sizes in splits.items():
        start = 0
        for number, size in enumerate(sizes):
            write_tar(root / split / f"{number}.tar", several(start, start + size))
            start += size
        (root / split / "nshards.txt").write_text(f"{len(sizes)}\n")
    (root / "classnames.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return root
