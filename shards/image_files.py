"""Read images that belong to no packed data set: single files, folders, and tar files such as WebDataset shards.

Shapes: B images, S image size.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from torch import Tensor

from shards.errors import DataError, DataUsageError
from shards.images import ImageError, decode
from shards.loader import prepare_batches
from shards.names import has_control
from shards.transforms import EvalTransform

SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"}

EncodedImage = tuple[str, Path | bytes]
"""The name of an image, and its file or its bytes."""


def find_images(paths: Sequence[Path]) -> Iterator[EncodedImage]:
    """Yield named files, then images of folders by name, and of tar files in their order; others are left out.

    Raises DataUsageError for a path that does not exist or has no images, and for a name with control characters.
    """
    for path in paths:
        found = False
        if path.is_dir():
            images: Iterable[EncodedImage] = _list_folder(path)
        elif path.suffix == ".tar":
            images = _read_tar(path)
        elif path.is_file():
            images = [(str(path), path)]
        else:
            raise DataUsageError(f"{path} does not exist: name images, folders of images, or tar files")
        for image in images:
            found = True
            if has_control(image[0]):
                raise DataUsageError(f"{image[0]!a} has a control character or is not UTF-8: rename it")
            yield image
        if not found:
            raise DataUsageError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))})")


def load_batches(
    images: Iterable[EncodedImage], transform: EvalTransform, batch_size: int, workers: int
) -> Iterator[tuple[list[str], Tensor]]:
    """Yield names and transformed images [B, 3, S, S], in order. Raises DataError, which names a broken image."""

    def prepare(image: EncodedImage, out: Tensor) -> None:
        name, data = image
        try:
            transform(decode(data if isinstance(data, bytes) else data.read_bytes()), out)
        except ImageError as error:
            raise DataError(f"{name} cannot be read: {error}") from error
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror or error}") from error

    shares = iter(images)
    batches = iter(lambda: list(islice(shares, batch_size)), [])
    for share, pixels in prepare_batches(batches, prepare, (3, transform.image_size, transform.image_size), workers):
        yield [name for name, _ in share], pixels


def _list_folder(folder: Path) -> Iterator[EncodedImage]:
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.suffix.lower() in SUFFIXES and file.is_file() and not hidden:
            yield str(file), file


def _read_tar(file: Path) -> Iterator[EncodedImage]:
    """Read from start to end; no member is extracted to the disk."""
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                if member.isfile() and Path(member.name).suffix.lower() in SUFFIXES:
                    content = archive.extractfile(member)
                    assert content is not None
                    yield f"{file}/{member.name}", content.read()
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
