"""Videos that are sent as a list of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_armllm.engine.media.image_files import decode_image, open_image
from torch_armllm.engine.media.video import Video, as_video, check_frames

if TYPE_CHECKING:
    from PIL.Image import Image


class VideoFrames:
    """Files of frames of which the headers were read; all of them are taken.

    Args:
        files: image files.
        fps: their number in a second; None: the model's processor assumes one.

    Raises:
        ValueError: a file is no image or too large, they have several sizes, or there are none.
    """

    def __init__(self, files: Sequence[bytes], fps: float | None) -> None:
        self._fps = fps
        self._frames: list[Image] = []
        for data in files:
            self._frames.append(open_image(data))
            (width, height), (first, second) = self._frames[-1].size, self._frames[0].size
            if (width, height) != (first, second):
                raise ValueError(
                    f"the frames of a video have {first} x {second} and {width} x {height} pixels: "
                    "give them one size"
                )
            check_frames(len(files), width, height)

    @property
    def nbytes(self) -> int:
        """See `OpenedMedium.nbytes`: Pillow keeps four for each pixel of a frame, and three are handed on."""
        return sum(7 * frame.width * frame.height for frame in self._frames)

    def decoded(self) -> Video:
        """See `OpenedMedium.decoded`."""
        return as_video(([decode_image(frame) for frame in self._frames], {"fps": self._fps}))
