"""Decoding: the pixels CoOp would see from every kind of file, the same all ways in, and a reason for what is none."""

import io
import os
import struct
import subprocess
import sys
import tarfile
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_images import put
from PIL import Image, ImageOps

from shards.images import ImageError, convert, decode, decode_pixels
from shards.loose_images import find_images, load_batches
from shards.pack import pack_source
from shards.raw.user_dataset import user_source
from shards.reader import open_dataset


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Garbage of other tests is collected at any time: a file that one of them left open, say.
        for other in (ResourceWarning, pytest.PytestWarning):
            warnings.simplefilter("ignore", other)
        yield


def photo(width: int = 90, height: int = 70, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


PHOTO, OTHER = photo(), photo(seed=1)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def plain(data: bytes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def pixels(data: bytes) -> np.ndarray:
    image = decode(data)
    assert image.mode == "RGB" and not image.info
    assert np.array_equal(decode_pixels(data), image)
    return np.asarray(image)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(chunk: bytes) -> bytes:
    """A whole PNG with one more chunk behind its header."""
    whole = encoded(PHOTO, "PNG")
    return whole[:33] + chunk + whole[33:]


EXIF = Image.Exif()
EXIF[0x0112] = 6  # orientation: turned by 90 degrees
EXIF[0x011A] = 300.0

KINDS = {
    "JPEG": encoded(PHOTO, "JPEG"),
    "progressive JPEG": encoded(PHOTO, "JPEG", progressive=True),
    "grey JPEG": encoded(PHOTO.convert("L"), "JPEG"),
    "CMYK JPEG": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "turned JPEG": encoded(PHOTO, "JPEG", exif=EXIF),
    "MPO": encoded(PHOTO, "MPO", save_all=True, append_images=[OTHER]),
    "PNG": encoded(PHOTO, "PNG"),
    "PNG with alpha": encoded(PHOTO.convert("RGBA"), "PNG"),
    "grey PNG": encoded(PHOTO.convert("L"), "PNG"),
    "grey PNG with alpha": encoded(PHOTO.convert("LA"), "PNG"),
    "black and white PNG": encoded(PHOTO.convert("1"), "PNG"),
    "palette PNG": encoded(PHOTO.quantize(64), "PNG"),
    "palette PNG, one transparent": encoded(PHOTO.quantize(64), "PNG", transparency=3),
    "palette PNG, many transparent": encoded(PHOTO.quantize(64), "PNG", transparency=bytes(range(64))),
    "RGB PNG, one transparent": encoded(PHOTO, "PNG", transparency=PHOTO.getpixel((0, 0))),
    "animated PNG": encoded(PHOTO, "PNG", save_all=True, append_images=[OTHER]),
    "GIF": encoded(PHOTO, "GIF"),
    "animated GIF": encoded(PHOTO, "GIF", save_all=True, append_images=[OTHER]),
    "WebP": encoded(PHOTO, "WEBP"),
    "WebP with alpha": encoded(PHOTO.convert("RGBA"), "WEBP", lossless=True),
    "animated WebP": encoded(PHOTO, "WEBP", save_all=True, append_images=[OTHER]),
    "BMP": encoded(PHOTO, "BMP"),
    "TIFF": encoded(PHOTO, "TIFF"),
    "packed TIFF": encoded(PHOTO, "TIFF", compression="tiff_lzw"),
    "CMYK TIFF": encoded(PHOTO.convert("CMYK"), "TIFF"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_pixels_that_coop_sees(kind):
    assert np.array_equal(pixels(KINDS[kind]), plain(KINDS[kind]))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_turned_jpeg_has_the_same_pixels_by_the_fast_decoder(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = encoded(PHOTO, "JPEG", exif=exif)
    upright = np.asarray(decode(turned, upright=True))
    assert np.array_equal(upright, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(turned)))))
    assert np.array_equal(decode_pixels(turned, upright=True), upright)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_pixels_of_jpegs_are_those_of_pillow_and_damage_is_found(count):
    draw = np.random.default_rng(0)
    for number in range(count):
        width, height, quality = (int(draw.integers(1, stop)) for stop in (130, 130, 100))
        image = photo(width, height, number).convert("L" if number % 5 == 0 else "RGB")
        options = {"quality": quality, "subsampling": number % 3, "progressive": number % 2 == 0}
        data = encoded(image, "JPEG", **options, restart_marker_rows=number % 7 == 0)
        assert np.array_equal(decode_pixels(data), plain(data))
        broken = bytearray(data)
        broken[draw.integers(len(data))] ^= 1 << draw.integers(8)
        for damaged in (bytes(broken), data[: draw.integers(len(data))]):
            assert result_or_error(decode_pixels, damaged) == result_or_error(decode, damaged)


def result_or_error(read, data: bytes) -> tuple[object, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pixels = np.asarray(read(data))
        except ImageError as error:
            return (str(error),)
    return pixels.shape, pixels.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_high_byte(kind):
    deep = np.array([[0, 1, 255, 256, 257, 32767, 32768, 65535]], np.uint16)
    got = pixels(encoded(Image.fromarray(deep), kind))
    assert got[0, :, 0].tolist() == [0, 0, 0, 1, 1, 127, 128, 255] and (got == got[..., :1]).all()


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_16_bit_values_are_scaled_from_the_bits_in_use(bits):
    deep = np.array([[0, 2 ** (bits - 1), 2**bits - 1]], np.uint16)
    assert pixels(encoded(Image.fromarray(deep), "PNG"))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("numbers", [np.float32, np.int32])
def test_pixels_of_unknown_range_are_refused_from_files_and_python(numbers):
    image = Image.fromarray(np.ones((4, 4), numbers))
    for read, picture in ((decode, encoded(image, "TIFF")), (convert, image), (convert, np.asarray(image))):
        with pytest.raises(ImageError, match="unknown range, save it with 8 bits"):
            read(picture)


def png_of_16_bits(values: np.ndarray) -> bytes:
    """A PNG of values [H, W, bands] below 2^16."""
    height, width, bands = values.shape
    colour = {2: 4, 3: 2, 4: 6}[bands]
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0))
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(lines)) + png_chunk(b"IEND", b"")


def tiff_of_16_bits(values: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    pytest.importorskip("tifffile").imwrite(buffer, values, photometric="rgb", **options)
    return buffer.getvalue()


TWELVE = np.random.default_rng(3).integers(0, 4096, (64, 64, 4)).astype(np.uint16)
TWELVE[0, 0] = 4095
SQUARE = photo(64, 64)
SQUARES = {
    **{f"{name} turned": encoded(SQUARE, name, exif=EXIF) for name in ("JPEG", "PNG", "WEBP")},
    "grey JPEG": encoded(SQUARE.convert("L"), "JPEG"),
    "CMYK JPEG turned": encoded(SQUARE.convert("CMYK"), "JPEG", exif=EXIF),
    "PNG with alpha": encoded(photo(64, 64, 2).convert("RGBA"), "PNG"),
    "palette PNG, one transparent": encoded(SQUARE.quantize(64), "PNG", transparency=3),
    "animated GIF": encoded(SQUARE, "GIF", save_all=True, append_images=[photo(64, 64, 1)]),
    "animated PNG": encoded(SQUARE, "PNG", save_all=True, append_images=[photo(64, 64, 1)]),
    "animated WEBP": encoded(SQUARE, "WEBP", save_all=True, append_images=[photo(64, 64, 1)]),
    "TIFF of two pages": encoded(SQUARE, "TIFF", save_all=True, append_images=[photo(64, 64, 1)]),
}
DEEP = {
    "grey PNG": (encoded(Image.fromarray(TWELVE[..., 0]), "PNG"), [0, 0, 0]),
    "grey TIFF": (encoded(Image.fromarray(TWELVE[..., 0]), "TIFF"), [0, 0, 0]),
    "grey PNG with alpha": (png_of_16_bits(TWELVE[..., :2]), [0, 0, 0]),
    "RGB PNG": (png_of_16_bits(TWELVE[..., :3]), [0, 1, 2]),
    "RGB PNG with alpha": (png_of_16_bits(TWELVE), [0, 1, 2]),
    "RGB TIFF": (tiff_of_16_bits(TWELVE[..., :3]), [0, 1, 2]),
    "packed RGB TIFF": (tiff_of_16_bits(TWELVE[..., :3], compression="zlib"), [0, 1, 2]),
}
EXPECTED = {
    **{name: np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
       for name, data in SQUARES.items()},
    **{f"12 bits: {name}": (TWELVE[..., bands] // 16).astype(np.uint8) for name, (_, bands) in DEEP.items()},
}  # fmt: skip
DATA = SQUARES | {f"12 bits: {name}": data for name, (data, _) in DEEP.items()}


class PixelsOnly:
    """In place of the test transform: the pixels [3, 64, 64]."""

    image_size, shape = 64, (3, 64, 64)

    def __call__(self, image, out):
        out.numpy()[:] = np.asarray(image).transpose(2, 0, 1)


def pixels_in_predict(path: Path) -> np.ndarray:
    [(_, batch)] = load_batches(find_images([path]), PixelsOnly(), 1, 0)
    return batch[0].numpy().transpose(1, 2, 0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed data set of `DATA`, an image to a class, in their order."""
    root = tmp_path_factory.mktemp("ways")
    for number, data in enumerate(DATA.values()):
        file = root / "images" / f"class {number:02d}" / "image.png"
        put(file)
        file.write_bytes(data)
    sheet = root / "ways.yaml"
    sheet.write_text("name: ways\ntemplate: a photo of a {}.\nfolder: images\nsplit: test\n")
    pack_source(user_source(sheet), root / "data")
    return open_dataset(root / "data", "ways").open_images("test")


@pytest.mark.parametrize("name", DATA)
def test_a_picture_has_the_same_pixels_all_ways_in(name, packed, tmp_path):
    data, number = DATA[name], [*DATA].index(name)
    file, tar = tmp_path / "photo.png", tmp_path / "photos.tar"
    file.write_bytes(data)
    with tarfile.open(tar, "w") as archive:
        archive.add(file, "some/photo.png")
    ways = {
        "file": pixels_in_predict(file),
        "tar": pixels_in_predict(tar),
        "data set": packed.image(number),
        "data set, for a GPU": packed.decode_pixels(number, packed.read(number)),
        "path": convert(str(file)),
        "image": convert(Image.open(file)),
        "array": convert(EXPECTED[name]),
    }
    if "12 bits" in name:
        bands = DEEP[name.removeprefix("12 bits: ")][1]
        ways["array of 16 bits"] = convert(TWELVE[..., bands if any(bands) else 0])
    if "12 bits" not in name or "grey TIFF" in name:
        loaded = Image.open(file)
        loaded.load()
        ways["loaded image"] = convert(loaded)
    for way, image in ways.items():
        assert np.array_equal(image, EXPECTED[name]), way


def test_pillow_prints_nothing_that_names_no_file():
    broken = b"Exif\0\0II\x2a\x00\x08\x00\x00\x00\xff\xff" + b"\x1a\x01\x05\x00\xff\xff\xff\xff" * 40
    script = (
        "import sys; from shards.images import decode\n"
        "try: decode(sys.stdin.buffer.read(), upright=True)\n"
        "except ValueError as error: print(error)"
    )
    data = encoded(PHOTO, "JPEG", exif=broken)
    run = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert run.stderr == run.stdout == b""


def test_a_damaged_tiff_is_an_error_alone(capfd):
    """libtiff would print "Using code not yet in table" to the file of stderr."""
    data = bytearray(encoded(photo(200, 200), "TIFF", compression="tiff_lzw"))
    data[2000:2100] = b"\xff" * 100
    with pytest.raises(ImageError, match="it is damaged"):
        decode(bytes(data))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_half_an_image_is_refused(kind, share):
    data = KINDS[kind]
    animated = "animated" in kind or kind == "MPO"
    whole = len(data) if not animated else len(data) // 3
    if "TIFF" in kind:
        # Pillow warns of a directory that a cut TIFF has lost, and refuses it.
        warnings.simplefilter("ignore")
    with pytest.raises(ImageError, match=r"cut short|damaged"):
        decode(data[: int(whole * share)])


@pytest.mark.parametrize("cut", [1, 2, 3, 40])
@pytest.mark.parametrize("kind", ["JPEG", "progressive JPEG", "grey JPEG", "CMYK JPEG"])
def test_a_jpeg_that_lacks_its_end_is_refused(kind, cut):
    for read in (decode, decode_pixels):
        with pytest.raises(ImageError, match="it is cut short"):
            read(KINDS[kind][:-cut])


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_behind_the_image_is_accepted(kind):
    assert np.array_equal(pixels(KINDS[kind] + b"\xff\x00garbage" * 100), plain(KINDS[kind]))


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "it is empty"),
    (b"not an image", "it is no JPEG, PNG, GIF, WEBP, BMP or TIFF image of 8 or 16 bits, or cut short"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is no JPEG"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is no JPEG"),
    (b"\x00" * 10_000, "it is no JPEG"),
    (b"\xff\xd8\xff", "cut short"),
    (b"\x89PNG\r\n\x1a\n", "cut short"),
    (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", b"\0\0\1"), "cut short"),
    (b"GIF89a", "cut short"),
    (b"RIFF\x04\x00\x00\x00WEBPVP8 ", "damaged"),
    (b"BMW is a car", "cut short"),
    (b"II\x2a\x00", "cut short"),
    (tiff_of_16_bits(np.ones((9, 9, 3), np.float32)), "it is no JPEG"),
])  # fmt: skip
def test_what_is_no_image_is_named(data, reason):
    with pytest.raises(ImageError, match=reason) as caught:
        decode(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([kind for kind in KINDS if "TIFF" not in kind]), st.data())
def test_damage_gives_an_image_or_an_image_error(kind, draw):
    data = bytearray(KINDS[kind])
    for _ in range(draw.draw(st.integers(1, 8))):
        data[draw.draw(st.integers(0, min(len(data), 400) - 1))] = draw.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert decode(bytes(data)).mode == "RGB"
        except ImageError as error:
            assert str(error).startswith("it")


def test_damaged_metadata_is_tolerated():
    # Pillow warns of it.
    warnings.simplefilter("ignore")
    broken = b"Exif\0\0II\x2a\x00\x08\x00\x00\x00\xff\xff" + b"\x1a\x01\x05\x00\xff\xff\xff\xff" * 40
    assert np.array_equal(pixels(encoded(PHOTO, "JPEG", exif=broken)), pixels(KINDS["JPEG"]))
    assert np.array_equal(pixels(encoded(PHOTO, "PNG", exif=broken)), np.asarray(PHOTO))
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        with_profile = encoded(PHOTO, kind, icc_profile=b"no profile at all" * 50)
        assert np.array_equal(pixels(with_profile), pixels(encoded(PHOTO, kind)))
    assert np.array_equal(pixels(png_with(png_chunk(b"iCCP", b"x\0\0not deflated"))), np.asarray(PHOTO))


def huge_png(width: int, height: int) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    # Animated, with a first frame that is cleared: memory for all pixels would be taken as soon as this is opened.
    control = png_chunk(b"acTL", struct.pack(">II", 2, 0))
    frame = png_chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, width, height, 0, 0, 1, 1, 1, 0))
    body = png_chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + header + control + frame + body + png_chunk(b"IEND", b"")


def huge_jpeg() -> bytes:
    data = bytearray(KINDS["JPEG"])
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 65_500, 65_500)
    return bytes(data)


BOMBS = {
    "PNG": huge_png(2**31 - 1, 2**31 - 1),
    "PNG over Pillow's limit": huge_png(12_000, 12_000),
    "PNG just over": huge_png(10_001, 10_000),
    "JPEG": huge_jpeg(),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_huge_image_is_refused_from_its_header(kind):
    warnings.simplefilter("ignore")
    with pytest.raises(ImageError, match=r"the limit is 100 million|more than 100 million"):
        decode(BOMBS[kind])


def test_a_thin_image_is_refused_that_would_be_huge_when_resized():
    for size in ((300_000, 1), (1, 300_000)):
        with pytest.raises(ImageError, match=r"the limit is 100 million pixels, also when resized"):
            decode(encoded(Image.new("RGB", size), "PNG"))
    assert decode(encoded(Image.new("RGB", (800, 1)), "PNG")).size == (800, 1)


OPEN_BOMBS = """
import sys, zlib
sys.path.insert(0, "tests")
from shards.images import ImageError, decode
from test_shards_images import BOMBS, png_chunk, png_with
packer = zlib.compressobj()
text = b"".join(packer.compress(b"0" * 1_000_000) for _ in range(200)) + packer.flush()
def peak():
    # Of this program alone, in kilobytes: what getrusage tells begins with those of its parent.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
for data in [*BOMBS.values(), png_with(png_chunk(b"zTXt", b"x\\0\\0" + text))]:
    try:
        decode(data)
    except ImageError as error:
        reason = error
    else:
        raise SystemExit("it was read")
print(peak() - before, reason)
"""


def test_bombs_take_no_memory():
    """Neither pixels that a header promises nor 200 MB of text packed into a chunk of a few hundred kB."""
    program = [sys.executable, "-W", "ignore", "-c", OPEN_BOMBS]
    run = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr
    grown, _, reason = run.stdout.partition(" ")
    assert int(grown) < 50_000 and "damaged (Decompressed data too large" in reason


def test_all_files_of_a_folder_are_listed_or_named(tmp_path):
    for name in ("photos/b.png", "photos/@eaDir/b.png", "disk/c.jfif"):
        put(tmp_path / name)
    (tmp_path / "photos/disk").symlink_to(tmp_path / "disk")
    (tmp_path / "photos/up").symlink_to("..")
    (tmp_path / "photos/gone.png").symlink_to("/nowhere/gone.png")
    os.mkfifo(tmp_path / "photos/pipe.png")
    errors = {}
    listed = [name for name, _ in find_images([tmp_path / "photos"], errors.setdefault)]
    assert [name.removeprefix(f"{tmp_path}/photos/") for name in listed] == ["b.png", "disk/c.jfif"]
    assert {Path(name).name: reason[:9] for name, reason in errors.items()} == {
        "gone.png": "is a link", "pipe.png": "is a link"
    }  # fmt: skip


def test_a_tar_of_macos_gives_each_image_once_and_names_those_of_formats_that_are_not_read(tmp_path):
    names = ("./a.jpg", "./._a.jpg", "__MACOSX/._a.jpg", "b.HEIC", "a.json", "a.cls")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    errors = {}
    images = [name for name, _ in find_images([tmp_path / "photos.tar"], errors.setdefault)]
    assert images == [f"{tmp_path}/photos.tar/./a.jpg"]
    assert errors == {f"{tmp_path}/photos.tar/b.HEIC": "is no image of a known format"}
