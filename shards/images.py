"""Decode images to RGB pixels, the same for files, members of tars and images of Python; by content, not by file name.

JPEG (and the first image of an MPO), PNG, GIF, WebP, BMP and TIFF are read; everything else is refused. What comes out
is what CoOp's `Image.open(file).convert("RGB")` gives: transparency is dropped, colour profiles are ignored, and the
EXIF orientation unless asked for; an animation is its first frame, a CMYK JPEG is read as Adobe writes it (inverted).
There are two differences. Values of 16 bits, which Pillow clips or of which it keeps the high byte, are scaled from the
bits that the image uses: 8, 10, 12, 14 or 16. 32-bit and floating-point pixels, which it clips too, have no known range
and are refused.
"""

from __future__ import annotations

import ctypes
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from PIL.ImageFile import ImageFile

from shards.files import read_regular

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")

JPEG_START = b"\xff\xd8\xff"
PNG_START = b"\x89PNG\r\n"

# More than any camera of the published sets took; 300 MB of RGB when decoded.
PIXEL_LIMIT = 100_000_000
# The test transform enlarges the shorter side to the image size of the backbone, at most this for CLIP's own.
LARGEST_SIDE = 336

SWAPPED = {"16B": "16L", "16L": "16B", "16N": "16B"}
"""The byte order by which Pillow, which keeps the first byte of 16-bit colour, reads the second; N: little-endian."""

Picture = Image.Image | NDArray[Any] | str | os.PathLike[str]
"""What Python users have of an image: of Pillow, an array [H, W] or [H, W, 3 or 4], or the path of a file."""

# Pillow prints what it notices in metadata without naming a file; what cannot be decoded is an `ImageError`.
warnings.filterwarnings("ignore", module=r"PIL\.")
# libtiff, which Pillow's module is linked to, prints as well.
with suppress(AttributeError, OSError):
    ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)


class ImageError(ValueError):
    """Bytes that are not a readable image; the message says why in a few words."""


@contextmanager
def _explained(data: bytes) -> Iterator[None]:
    """Raise ImageError for what goes wrong in decoding `data`."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"it has more than {PIXEL_LIMIT // 1_000_000} million pixels") from None
    except Image.UnidentifiedImageError:
        formats = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]} image of 8 or 16 bits"
        raise ImageError(f"it is no {formats}, or cut short" if data else "it is empty") from None
    # Parsers of untrusted bytes raise errors of nearly any class.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        is_short = "truncated" in text.lower() or "unpack" in text
        raise ImageError("it is cut short" if is_short else f"it is damaged ({text})") from error


def decode(data: bytes, *, upright: bool = False, reduced_to: int = 0) -> Image.Image:
    """Decode an image to RGB, with `upright` turned as its EXIF orientation says. Raises ImageError; thread-safe.

    reduced_to: a JPEG image may be decoded to a half, a quarter or an eighth with no shorter side below this.
    """
    with _explained(data):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(*image.size)
        if reduced_to:
            image.draft(None, shorter_side(image.size, reduced_to))
        second_bytes = _second_bytes(image, data)
        image.load()
        if second_bytes is not None:
            # Of grey with transparency, which has become RGBA, all three colours get the same second bytes.
            first_bytes = np.asarray(image)[..., :3].astype(np.uint16)
            rgb = Image.fromarray(_scale(first_bytes * np.uint16(256) + second_bytes))
        else:
            rgb = _to_rgb(image)
        return _turn(rgb, image) if upright else rgb


def convert(picture: Picture) -> Image.Image:
    """Convert to the upright RGB image that `decode` gives for its file. Raises ImageError, OSError for a file."""
    if isinstance(picture, str | os.PathLike):
        return decode(read_regular(Path(picture)), upright=True)
    image = _from_array(picture) if isinstance(picture, np.ndarray) else picture
    with _explained(b"picture"):
        if isinstance(image, ImageFile) and image.fp and image.tile and image.format in FORMATS and not image.tell():
            # Not loaded yet: its file has what Pillow would drop.
            position = image.fp.tell()
            image.fp.seek(0)
            data = image.fp.read()
            image.fp.seek(position)
            return decode(data, upright=True)
        return _turn(_to_rgb(image), image)


def _from_array(array: NDArray[Any]) -> Image.Image:
    try:
        if array.dtype == np.uint16:
            array = _scale(array[..., :3] if array.ndim > 2 else array)
        return Image.fromarray(array)
    except (TypeError, ValueError):
        form = f"{array.dtype} {list(array.shape)}"
        raise ImageError(f"an array of {form} is no image: give uint8 [H, W] or [H, W, 3]") from None


def decode_pixels(data: bytes, *, upright: bool = False) -> NDArray[np.uint8]:
    """Decode an image to the pixels [H, W, 3] of `decode`, without an image of Pillow where that is faster."""
    if data.startswith(JPEG_START):
        # libjpeg-turbo refuses damage of every kind here, of which Pillow tolerates some or names the reason.
        with suppress(ValueError):
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            _check_size(width, height)
            is_turned = upright and _find_orientation(Image.open(io.BytesIO(data))) != 1
            if colours in ("YCbCr", "Gray") and not is_turned:
                # By default with the accurate DCT and upsampling, as Pillow does: equal pixels, which a test compares.
                return simplejpeg.decode_jpeg(data)
    return np.array(decode(data, upright=upright))


def shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Scale (width, height) to the shorter side `side`; the longer one is rounded down, as torchvision does."""
    width, height = size
    return (side, side * height // width) if width <= height else (side * width // height, side)


def shrink(data: bytes, side: int) -> bytes:
    """Encode a JPEG or PNG image upright with `side` pixels on the shorter side; others are returned as they are."""
    is_jpeg = data.startswith(JPEG_START)
    if not (is_jpeg or data.startswith(PNG_START)):
        return data
    try:
        # A whole decoding takes three times as long; half the pixels of a side are left for the filter to average.
        image = decode(data, upright=True, reduced_to=2 * side)
    except ImageError:
        return data
    if min(image.size) <= side:
        return data
    stream = io.BytesIO()
    smaller = image.resize(shorter_side(image.size, side), Image.Resampling.LANCZOS)
    # Without subsampling of colours, which a photograph has had once already.
    smaller.save(stream, "JPEG", quality=95, subsampling=0) if is_jpeg else smaller.save(stream, "PNG")
    return stream.getvalue()


def _check_size(width: int, height: int) -> None:
    """Refuse images that take too much memory as they are, or resized to the image size of a backbone."""
    resized_width, resized_height = shorter_side((width, height), LARGEST_SIDE)
    if max(width * height, resized_width * resized_height) > PIXEL_LIMIT:
        limit = f"{PIXEL_LIMIT // 1_000_000} million pixels, also when resized to a shorter side of {LARGEST_SIDE}"
        raise ImageError(f"it has {width:,} x {height:,} pixels; the limit is {limit}")


def _find_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) if there is none or an unknown one."""
    # Parsers of untrusted bytes raise errors of nearly any class. An orientation that cannot be read is none.
    with suppress(Exception):
        orientation: Any = image.getexif().get(ExifTags.Base.Orientation)
        return int(orientation) if orientation in range(2, 9) else 1
    return 1


def _turn(rgb: Image.Image, image: Image.Image) -> Image.Image:
    """Turn `rgb` upright as the EXIF orientation of `image` says."""
    if (orientation := _find_orientation(image)) == 1:
        return rgb
    rgb.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(rgb)


def _second_bytes(image: ImageFile, data: bytes) -> NDArray[np.uint8] | None:
    """Read the second bytes [H, W, 3 or 1] of 16-bit colour or grey with alpha, as Pillow reads the first; or None."""
    # PNG names a layout such as RGB;16B, TIFF gives more arguments behind it.
    arguments = [[tile.args] if isinstance(tile.args, str) else [*(tile.args or ())] for tile in image.tile]
    bands, _, order = str(arguments[0][0] if arguments and arguments[0] else "").partition(";")
    if bands not in ("RGB", "RGBA", "LA") or order not in SWAPPED:
        return None
    layout = "RGBA" if bands == "LA" else f"{bands};{SWAPPED[order]}"
    again = Image.open(io.BytesIO(data), formats=FORMATS)
    again.tile = [
        tile._replace(args=(layout, *more) if more else layout)
        for tile, (_, *more) in zip(again.tile, arguments, strict=True)
    ]
    pixels = np.asarray(again)
    return pixels[..., 1:2] if bands == "LA" else pixels[..., :3]


def _scale(values: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Scale values of 16 bits to 8, from the bits in use: 8, 10, 12, 14 or 16, the depths of cameras and scanners."""
    bits = next(bits for bits in (8, 10, 12, 14, 16) if values.max() < 2**bits)
    return (values >> (bits - 8)).astype(np.uint8)


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode in ("I", "F"):
        raise ImageError("its pixels are 32-bit or floating-point numbers of unknown range, save it with 8 bits")
    if image.mode.startswith("I;16"):
        return Image.fromarray(_scale(np.asarray(image).astype(np.uint16))).convert("RGB")
    # Drop a palette's transparency like any other alpha channel; otherwise Pillow warns about it on stderr.
    transparency = image.info.pop("transparency", None)
    pixels = image if image.mode == "RGB" else image.convert("RGB")
    if transparency is not None:
        image.info["transparency"] = transparency
    # Return a plain image: the reader's image holds the encoded file, which a cache of images would keep alive.
    plain = image._new(pixels.im)
    plain.info.clear()
    return plain
