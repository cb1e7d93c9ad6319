"""Pictures from the URLs of chat messages."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_armllm.engine.images.media_access import MediaAccess
from torch_armllm.system.extras import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 25
"""Pixels of a picture, by its header: decoding takes four bytes for each."""
MOST_PIXELS_TOGETHER = 1 << 26
"""Pixels of all pictures of a request to a server, and of those that its requests hold at a time."""
MOST_RATIO = 200
"""Of a picture's sides: processors that make the shorter one as long as their model's enlarge the other."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PICTURES = ("image_url", "image_pil")


class OpenedPicture(NamedTuple):
    """A picture of a message: a file of which the header was read, or the caller's own."""

    picture: Image
    is_file: bool

    @property
    def pixels(self) -> int:
        """The pixels that are to be decoded."""
        return self.picture.width * self.picture.height if self.is_file else 0

    def decoded(self) -> Image:
        """Returns the picture, upright and in RGB; of several frames the first.

        Raises:
            ValueError: it is damaged.
        """
        return decode_picture(self.picture) if self.is_file else self.picture


def with_pictures(
    messages: Sequence[Mapping[str, Any]], access: MediaAccess, limit: int
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Takes the pictures out of messages.

    Args:
        messages: a conversation; parts ``{"type": "image_url", "image_url": {"url": …}}`` hold pictures, and
            those of offline calls ``{"type": "image_pil", "image_pil": picture}``.
        access: what their URLs may name.
        limit: most pictures; more are refused before any is decoded.

    Returns:
        Messages with ``{"type": "image"}`` instead, as chat templates read them, and the pictures in order.

    Raises:
        ValueError: a picture cannot be read or may not be, or there are too many.
    """
    converted, opened = open_pictures(messages, access, limit)
    return converted, [picture.decoded() for picture in opened]


def open_pictures(
    messages: Sequence[Mapping[str, Any]], access: MediaAccess, limit: int, most_pixels: int | None = None
) -> tuple[list[dict[str, Any]], list[OpenedPicture]]:
    """Takes the pictures out of messages, and reads no more than their headers; see `with_pictures`.

    Args:
        messages: see there.
        access: see there.
        limit: see there.
        most_pixels: of all pictures together; None: any number.

    Returns:
        The messages, and the pictures.

    Raises:
        ValueError: see there; or the pictures have more pixels together.
    """
    count = sum(_kind(part) in _PICTURES for message in messages for part in _parts(message))
    check_count(count, limit)
    pictures: list[OpenedPicture] = []
    pixels = 0
    converted = []
    for message in messages:
        if any(_kind(part) in _PICTURES for part in _parts(message)):
            parts = []
            for part in _parts(message):
                if _kind(part) in _PICTURES:
                    pictures.append(_picture(part, access))
                    pixels += pictures[-1].pixels
                    if most_pixels is not None and pixels > most_pixels:
                        raise ValueError(
                            f"the pictures of a request may have at most {most_pixels} pixels together: send "
                            "smaller ones, or fewer"
                        )
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        converted.append(dict(message))
    return converted, pictures


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a part of a message is a picture."""
    return any(_kind(part) in _PICTURES for message in messages for part in _parts(message))


def check_count(count: int, limit: int, noun: str = "pictures") -> None:
    """Raises ValueError if a prompt has more pictures, or others, than ``limit_mm_per_prompt`` allows."""
    if count > limit:
        raise ValueError(
            f"the prompt has {count} {noun}, and limit_mm_per_prompt allows {limit}: send fewer, or raise it"
        )


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _picture(part: Mapping[str, Any], access: MediaAccess) -> OpenedPicture:
    if part["type"] == "image_pil":
        return OpenedPicture(part["image_pil"], is_file=False)
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise ValueError('an image_url part needs {"image_url": {"url": "data:image/png;base64,…"}}')
    return OpenedPicture(open_picture(access.read(url)), is_file=True)


def open_picture(data: bytes) -> Image:
    """Opens a picture, and decodes nothing yet.

    Raises:
        ValueError: it is damaged, of another format, or has too many pixels by its header.
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ImportError(f"pictures need Pillow: {install_command('vision')}") from error
    try:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f"a picture may have at most {MOST_PIXELS} pixels: send a smaller one") from error
    except Exception as error:
        known = ", ".join(_FORMATS)
        raise ValueError(f"a picture cannot be read: it is damaged, or none of {known}") from error
    check_size(picture)
    return picture


def decode_picture(picture: Image) -> Image:
    """Decodes a picture that was opened, upright and in RGB; of several frames the first.

    Raises:
        ValueError: it is damaged.
    """
    from PIL import ImageOps

    try:
        picture.load()
        if picture.mode.startswith("I"):  # 16 bits of gray, which Pillow would cut off at 255
            picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        ImageOps.exif_transpose(picture, in_place=True)
        return picture.convert("RGB")
    except Exception as error:  # decoders raise errors of many kinds
        raise ValueError(f"a picture is damaged: {error}") from error


def check_size(picture: Image) -> None:
    """Raises ValueError if a picture is larger than `MOST_PIXELS`, or narrower than `MOST_RATIO`."""
    width, height = picture.size
    if max(width, height) > MOST_RATIO * min(width, height):
        raise ValueError(
            f"a picture of {width} x {height} pixels is too narrow; one side may be {MOST_RATIO} times the "
            "other: crop it"
        )
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"a picture of {width} x {height} pixels is too large; it may have {MOST_PIXELS}: "
            "send a smaller one"
        )
