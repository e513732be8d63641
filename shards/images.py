"""Decode images to RGB pixels, the same everywhere: by content and not by file name, without external programs.

JPEG (and the first image of an MPO), PNG, GIF, WebP, BMP and TIFF are read; everything else is refused. What comes out
is what CoOp's `Image.open(file).convert("RGB")` gives: transparency is dropped, colour profiles are ignored, and the
EXIF orientation unless asked for; an animation is its first frame, a CMYK JPEG is read as Adobe writes it (inverted).
There are two differences. 16-bit grey, which Pillow clips at 255, keeps its high byte, as Pillow does for 16-bit
colour. 32-bit and floating-point pixels, which it clips too, have no known range and are refused.
"""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")

JPEG_START = b"\xff\xd8\xff"

# More than any camera of the published sets took; 300 MB of RGB when decoded.
PIXEL_LIMIT = 100_000_000
# The test transform enlarges the shorter side to the image size of the backbone, at most this for CLIP's own.
LARGEST_SIDE = 336


class ImageError(ValueError):
    """Bytes that are not a readable image; the message says why in a few words."""


def decode(data: bytes, *, upright: bool = False) -> Image.Image:
    """Decode an image to RGB, with `upright` turned as its EXIF orientation says. Raises ImageError; thread-safe."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(*image.size)
        if upright:
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"it has more than {PIXEL_LIMIT // 1_000_000} million pixels") from None
    except Image.UnidentifiedImageError:
        reason = f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image, or cut short" if data else "it is empty"
        raise ImageError(reason) from None
    # Parsers of untrusted bytes raise errors of nearly any class.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        is_short = "truncated" in text.lower() or "unpack" in text
        raise ImageError("it is cut short" if is_short else f"it is damaged ({text})") from error


def decode_pixels(data: bytes) -> NDArray[np.uint8]:
    """Decode an image to the pixels [H, W, 3] of `decode`, without an image of Pillow where that is faster."""
    if data.startswith(JPEG_START):
        # libjpeg-turbo refuses damage of every kind here, of which Pillow tolerates some or names the reason.
        with suppress(ValueError):
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            _check_size(width, height)
            if colours in ("YCbCr", "Gray"):
                # By default with the accurate DCT and upsampling, as Pillow does: equal pixels, which a test compares.
                return simplejpeg.decode_jpeg(data)
    return np.array(decode(data))


def turn_upright(data: bytes) -> bytes:
    """Return an image file with the EXIF orientation applied to its pixels; the same bytes if there is none."""
    # Parsers of untrusted bytes raise errors of nearly any class, and `decode` reports a file that is broken.
    with suppress(Exception):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            buffer, file_format = io.BytesIO(), "JPEG" if image.format == "MPO" else image.format
            # A JPEG is encoded a second time here: full colour resolution keeps the loss small.
            decode(data, upright=True).save(buffer, file_format, quality=95, subsampling=0)
            return buffer.getvalue()
    return data


def shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Scale (width, height) to the shorter side `side`; the longer one is rounded down, as torchvision does."""
    width, height = size
    return (side, side * height // width) if width <= height else (side * width // height, side)


def _check_size(width: int, height: int) -> None:
    """Refuse images that take too much memory as they are, or resized to the image size of a backbone."""
    resized_width, resized_height = shorter_side((width, height), LARGEST_SIDE)
    if max(width * height, resized_width * resized_height) > PIXEL_LIMIT:
        limit = f"{PIXEL_LIMIT // 1_000_000} million pixels, also when resized to a shorter side of {LARGEST_SIDE}"
        raise ImageError(f"it has {width:,} x {height:,} pixels; the limit is {limit}")


def _to_rgb(image: Image.Image) -> Image.Image:
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
