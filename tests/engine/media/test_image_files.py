"""Pictures of all kinds of files: upright, in RGB, and of several frames the first."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from PIL import Image  # noqa: E402

from torch_armllm.engine.media.media import open_media, with_media  # noqa: E402
from torch_armllm.engine.media.media_access import MediaAccess  # noqa: E402
from torch_armllm.engine.media.taken_media import TakenMedia  # noqa: E402

TAKEN = TakenMedia("Seer", {"image": 3})


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def message(*files: bytes) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def decoded(data: bytes) -> Image.Image:
    (picture,) = with_media(message(data), MediaAccess(), TAKEN)[1]["image"]
    assert picture.mode == "RGB"
    return picture


def header(width: int, height: int) -> bytes:
    """Returns a PNG file without a byte of pixels."""
    data = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", data), (b"IDAT", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    picture = Image.new("RGB", (4, 2), (200, 200, 200)).convert(mode)
    data = saved(picture, "JPEG", quality=100) if mode in ("CMYK", "YCbCr") else saved(picture)
    pixel = np.asarray(decoded(data))[0, 0]
    wanted = 255 if mode == "1" else 200
    assert np.abs(pixel.astype(int) - wanted).max() <= 5


def test_gray_of_16_bits_keeps_its_shades() -> None:
    shades = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    found = np.asarray(decoded(saved(Image.fromarray(shades))))
    assert np.array_equal(found[..., 0], (shades >> 8).astype(np.uint8))
    assert np.array_equal(found[..., 0], found[..., 2])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_several_frames_the_first_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decoded(data).getpixel((0, 0)) == (255, 0, 0)


def test_pictures_are_turned_upright() -> None:
    picture = Image.new("RGB", (4, 2), "red")
    exif = picture.getexif()
    exif[0x0112] = 6
    assert decoded(saved(picture, "JPEG", exif=exif)).size == (2, 4)


def test_a_frame_larger_than_its_gif_counts() -> None:
    """The header of a GIF says one pixel, and that of its frame sixty thousand squared."""
    data = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0)
    data += b"," + struct.pack("<HHHHB", 0, 0, 60000, 60000, 0) + b"\x02\x02\x4c\x01\x00;"
    with pytest.raises(ValueError, match="pixels"):
        decoded(data)


def test_pixels_are_bounded_together_before_any_is_decoded() -> None:
    big = header(5000, 5000)
    converted, opened = open_media(message(big, big), MediaAccess(), TAKEN, 200_000_000)
    assert [each.nbytes for each in opened["image"]] == [100_000_000] * 2
    assert converted[0]["content"] == [{"type": "image"}] * 2
    with pytest.raises(ValueError, match="at most 200000000 bytes together when .* send smaller ones, or"):
        open_media(message(big, big, header(1, 1)), MediaAccess(), TAKEN, 200_000_000)


def test_pictures_of_the_caller_are_left_alone() -> None:
    own = Image.new("RGBA", (7000, 7000))
    parts = [{"role": "user", "content": [{"type": "image_pil", "image_pil": own}]}]
    assert with_media(parts, MediaAccess(), TAKEN)[1] == {"image": [own]}
    assert open_media(parts, MediaAccess(), TAKEN, 1)[1]["image"][0].nbytes == 0
