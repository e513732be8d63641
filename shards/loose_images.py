"""Read images that belong to no packed data set: single files, folders, and tar files such as WebDataset shards.

Shapes: B images, S image size.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from torch import Tensor

from procap.errors import UsageError
from shards.eval_views import AnyEvalTransform
from shards.files import read_regular, require_regular
from shards.images import ImageError, decode
from shards.loader import prepare_batches
from shards.raw.folders import IMAGE_EXTENSIONS, LEAVINGS, NOTES, is_image_name, walk_files

UNREAD_IMAGES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".ppm", ".pgm", ".svg", ".dng", ".cr2", ".nef", ".psd")
"""Endings of images that are not read, which have to be told from the texts and labels of a WebDataset shard."""

EncodedImage = tuple[str, Path | bytes]
"""The name of an image, and its file or its bytes."""
OnError = Callable[[str, str], None]
"""Receives the name of what cannot be read, and the reason."""


def raise_error(name: str, reason: str) -> None:
    """Raise UsageError for what cannot be read, the default of an `OnError`."""
    raise UsageError(f"{name} {reason}")


def find_images(paths: Sequence[Path], on_error: OnError = raise_error) -> Iterator[EncodedImage]:
    """Iterate over named files, then images of folders by name, and of tar files in their order; others are left out.

    on_error: called for a path without images, a file of an unknown format in a folder, a broken tar file.
    Raises UsageError for paths that do not exist, when it is called.
    """
    if missing := [str(path) for path in paths if not path.exists()]:
        verb = "does" if len(missing) == 1 else "do"
        raise UsageError(f"{', '.join(missing)} {verb} not exist: name images, folders of images, or tar files")
    return (image for path in paths for image in _read_path(path, on_error))


def _read_path(path: Path, on_error: OnError) -> Iterator[EncodedImage]:
    if path.is_dir():
        images: Iterable[EncodedImage] = _list_folder(path, on_error)
    else:
        images = _read_tar(path, on_error) if path.suffix.lower() == ".tar" else [(str(path), path)]
    has_images = False
    try:
        for image in images:
            has_images = True
            yield image
    # Forged sizes in headers of a tar raise the last three.
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
        what = " as a tar without compression" if isinstance(error, tarfile.TarError) else ""
        on_error(str(path), f"cannot be read{what}: {str(error) or type(error).__name__}")
    else:
        if not has_images:
            on_error(str(path), f"holds no images ({', '.join(sorted(IMAGE_EXTENSIONS))})")


def load_batches(
    images: Iterable[EncodedImage],
    transform: AnyEvalTransform,
    batch_size: int,
    workers: int,
    on_error: OnError = raise_error,
) -> Iterator[tuple[list[str], Tensor]]:
    """Yield names and transformed images [B, *transform.shape], in order. on_error: called for what is left out."""
    # Threads write to it; it is read when all images of a batch are done.
    broken: dict[str, str] = {}

    def prepare(image: EncodedImage, out: Tensor) -> None:
        name, data = image
        try:
            transform(decode(data if isinstance(data, bytes) else read_regular(data), upright=True), out)
        except (ImageError, OSError) as error:
            broken[name] = f"cannot be read: {getattr(error, 'strerror', None) or error}"

    remaining = iter(images)
    # Python 3.12 has `itertools.batched` for this.
    batches = iter(lambda: list(islice(remaining, batch_size)), [])
    for batch, pixels in prepare_batches(batches, prepare, transform.shape, workers):
        for name, _ in batch:
            if name in broken:
                on_error(name, broken[name])
        readable = [number for number, (name, _) in enumerate(batch) if name not in broken]
        if readable:
            yield [batch[number][0] for number in readable], pixels[readable]


def _list_folder(folder: Path, on_error: OnError) -> Iterator[EncodedImage]:
    for file, entry in sorted((folder / path, entry) for path, entry in walk_files(folder)):
        if entry == "other":
            on_error(str(file), "is a link without a target, or no regular file")
        elif entry == "image":
            yield str(file), file
        elif entry == "file" and file.suffix.lower()[1:] not in NOTES:
            on_error(str(file), "is no image of a known format")


def _read_tar(file: Path, on_error: OnError) -> Iterator[EncodedImage]:
    """Read the images of a tar from start to end; no member is extracted to the disk."""
    with tarfile.open(require_regular(file), "r:") as archive:
        for member in archive:
            name, parts = f"{file}/{member.name}", PurePosixPath(member.name).parts
            if any(part.lower() in LEAVINGS or (part[0] == "." and part != "..") for part in parts):
                # Archives of macOS hold a second, hidden file for each.
                continue
            if member.isreg() and member.name.lower().endswith(UNREAD_IMAGES):
                on_error(name, "is no image of a known format")
            elif is_image_name(member.name) and not member.isdir():
                if member.isreg() and (content := archive.extractfile(member)):
                    yield name, content.read()
                else:
                    on_error(name, "is a link or no regular file: extract the tar and name the folder")
        end = archive.offset
    # tarfile ends at the first header that is empty or broken.
    with file.open("rb") as stream:
        stream.seek(end)
        if any(block.strip(b"\0") for block in iter(lambda: stream.read(2**20), b"")):
            on_error(str(file), "continues after the end of its archive, where nothing is read: split or pack it again")
