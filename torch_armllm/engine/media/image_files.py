"""Images of prompts: files of messages, and those of callers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.media.taken_media import TakenMedia
from torch_armllm.system.extras import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 25
"""Pixels of an image, by its header: decoding takes four bytes for each."""
MOST_RATIO = 200
"""Of an image's sides: processors that make the shorter one as long as their model's enlarge the other."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


class OpenedImage(NamedTuple):
    """An image of a message: a file of which the header was read, or the caller's own."""

    image: Image
    is_file: bool

    @property
    def nbytes(self) -> int:
        """See `OpenedMedium.nbytes`."""
        return 4 * self.image.width * self.image.height if self.is_file else 0

    def decoded(self) -> Image:
        """See `OpenedMedium.decoded`: the image, upright and in RGB; of several frames the first."""
        return decode_image(self.image) if self.is_file else self.image


def given_image(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> OpenedImage:
    """Returns the image of an offline part ``{"type": "image_pil", "image_pil": image}``.

    Raises:
        ValueError: there is none.
    """
    if part.get("image_pil") is None:
        raise ValueError('an image_pil part needs {"image_pil": image}, a PIL.Image.Image')
    return OpenedImage(part["image_pil"], is_file=False)


def image_of_url(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> OpenedImage:
    """Opens the file of a part ``{"type": "image_url", "image_url": {"url": …}}``.

    Raises:
        ValueError: it cannot be read or may not be, is no image, or too large by its header.
    """
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise ValueError('an image_url part needs {"image_url": {"url": "data:image/png;base64,…"}}')
    return OpenedImage(open_image(access.read(url)), is_file=True)


def open_image(data: bytes) -> Image:
    """Opens an image, and decodes nothing yet.

    Raises:
        ValueError: it is damaged, of another format, or has too many pixels by its header.
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ImportError(f"images need Pillow: {install_command('vision')}") from error
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f"an image may have at most {MOST_PIXELS} pixels: send a smaller one") from error
    except Exception as error:
        known = ", ".join(_FORMATS)
        raise ValueError(f"an image cannot be read: it is damaged, or none of {known}") from error
    check_size(image)
    return image


def decode_image(image: Image) -> Image:
    """Decodes an image that was opened, upright and in RGB; of several frames the first.

    Raises:
        ValueError: it is damaged.
    """
    from PIL import ImageOps

    try:
        image.load()
        if image.mode.startswith("I"):  # 16 bits of gray, which Pillow would cut off at 255
            image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")
    except Exception as error:  # decoders raise errors of many kinds
        raise ValueError(f"an image is damaged: {error}") from error


def check_size(image: Image) -> None:
    """Raises ValueError if an image is larger than `MOST_PIXELS`, narrower than `MOST_RATIO`, or empty."""
    width, height = image.size
    if not min(width, height):
        raise ValueError(f"an image of {width} x {height} pixels has none: leave it out")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow; one side may be {MOST_RATIO} times the "
            "other: crop it"
        )
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"an image of {width} x {height} pixels is too large; it may have {MOST_PIXELS}: "
            "send a smaller one"
        )
