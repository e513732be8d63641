"""Decode images to RGB pixels, the same everywhere: by content and not by file name, without external programs.

JPEG (and the first image of an MPO), PNG, GIF, WebP, BMP and TIFF are read; everything else is refused. What comes out
is what CoOp's `Image.open(file).convert("RGB")` gives: transparency is dropped, colour profiles and the EXIF
orientation are ignored, an animation is its first frame, a CMYK JPEG is read as Adobe writes it (inverted). It differs
in two places. 16-bit grey, which Pillow clips at 255, keeps its high byte, as Pillow does for 16-bit colour. 32-bit and
floating-point pixels, which it clips too, have no known range and are refused.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import PREFIXES as TIFF_PREFIXES
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

# More than any camera of the published sets took; 400 MB when decoded.
PIXEL_LIMIT = 100_000_000
JPEG_QUALITY = 95


class ImageError(ValueError):
    """Bytes that are not a readable image; the message says why in a few words."""


class _Jpeg(JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        # Damaged EXIF, common in photographs, would give warnings about a resolution that is not used.
        pass


READERS: dict[bytes, type[ImageFile]] = {
    **dict.fromkeys(TIFF_PREFIXES, TiffImageFile),
    **dict.fromkeys((b"GIF87a", b"GIF89a"), GifImageFile),
    b"\xff\xd8\xff": _Jpeg,
    b"\x89PNG\r\n\x1a\n": PngImageFile,
    b"BM": BmpImageFile,
}
"""The reader of each format by the first bytes of a file; `_open` recognises WebP."""


def decode(data: bytes) -> Image.Image:
    """Decode an image to RGB. Raises ImageError; safe to call from many threads."""
    with _as_image_error():
        return _rgb(_open(data))


def shrink(data: bytes, side: int) -> tuple[bytes, str] | None:
    """Re-encode an image so that its shorter side is `side` pixels: the new bytes and their file extension.

    None when it is not larger; its pixels are not decoded then. Resized as the test transform does, so that evaluation
    with images of `side` pixels sees the same pixels but for what JPEG loses. JPEG stays JPEG (quality 95, colour at
    full resolution), all else becomes PNG. The same bytes and the same Pillow give the same bytes.
    """
    with _as_image_error():
        image = _open(data)
        if min(image.size) <= side:
            return None
        small = _rgb(image).resize(shorter_side(image.size, side), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        if isinstance(image, JpegImageFile):
            small.save(buffer, format="JPEG", quality=JPEG_QUALITY, subsampling=0)
            return buffer.getvalue(), "jpg"
        small.save(buffer, format="PNG")
        return buffer.getvalue(), "png"


def shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Scale (width, height) to the shorter side `side`; the longer one is rounded down, as torchvision does."""
    width, height = size
    return (side, side * height // width) if width <= height else (side * width // height, side)


def _open(data: bytes) -> ImageFile:
    """Parse the header; no pixel is decoded and no memory for pixels is taken."""
    reader = next((reader for start, reader in READERS.items() if data.startswith(start)), None)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        reader = WebPImageFile
    if reader is None:
        raise ImageError("it is empty" if not data else "it is no JPEG, PNG, GIF, WebP, BMP or TIFF image")
    _refuse_huge(_declared_size(data))
    # Call the readers by name: Image.open warns about large images by a global limit that any code can change.
    image = reader(io.BytesIO(data))
    _refuse_huge(image.size)
    return image


def _declared_size(data: bytes) -> tuple[int, int]:
    """Read the size from the header of formats whose readers allocate before they check it; else (0, 0)."""
    if data.startswith(b"\x89PNG") and len(data) >= 24:
        return struct.unpack(">II", data[16:24])
    if data.startswith(b"GIF8") and len(data) >= 10:
        return struct.unpack("<HH", data[6:10])
    if data[12:16] == b"VP8X" and len(data) >= 30:
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if data[12:16] == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if data[12:16] == b"VP8 " and len(data) >= 30:
        width, height = struct.unpack("<HH", data[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _refuse_huge(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > PIXEL_LIMIT:
        limit = PIXEL_LIMIT // 1_000_000
        raise ImageError(f"it has {width:,} x {height:,} pixels, more than {limit} million")


def _rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode in ("I", "F"):
        raise ImageError("its pixels are 32-bit or floating-point numbers of unknown range, save it with 8 bits")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    # Drop a palette's transparency like any other alpha channel; otherwise Pillow warns about it on stderr.
    image.info.pop("transparency", None)
    pixels = image if image.mode == "RGB" else image.convert("RGB")
    # Return a plain image: the reader's image holds the encoded file, which a cache of images would keep alive.
    plain = image._new(pixels.im)
    plain.info.clear()
    return plain


@contextmanager
def _as_image_error() -> Iterator[None]:
    """Turn whatever a parser of untrusted bytes may raise into an ImageError."""
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        short = "truncated" in text.lower() or "unpack" in text
        raise ImageError("it is cut short" if short else f"it is damaged ({text})") from error
