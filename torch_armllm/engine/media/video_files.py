"""Video files: what their containers say, and decoding sampled frames."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_armllm.engine.media.image_files import MOST_PIXELS
from torch_armllm.engine.media.video import MOST_FRAMES, Frames, Video, check_frames
from torch_armllm.engine.media.video_sampling import VideoSampling
from torch_armllm.system.extras import require_extra

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

MOST_SECONDS = 3600
"""Of a video file."""
MOST_DECODED_PIXELS = 1 << 36
"""Of all frames up to the last one that is sampled: those between are decoded too, and then dropped."""
_CONTAINERS = "mov,matroska,webm,gif,avi"
"""Formats that FFmpeg may read.  Those of lists would open the files and hosts that they name."""
_OPTIONS = {"format_whitelist": _CONTAINERS, "max_pixels": str(MOST_PIXELS)}


class VideoFile:
    """A video file of which the container was read, and the frames that are to be decoded.

    Args:
        data: the file.
        sampling: chooses the frames.

    Attributes:
        metadata: see `Video`.

    Raises:
        ValueError: the file is damaged or of another format, holds no video, or one that is too large.
        ImportError: PyAV is not installed.
    """

    def __init__(self, data: bytes, sampling: VideoSampling) -> None:
        require_extra("av", "video", "a video file")
        self._data = data
        with _opened(data) as (container, stream):
            width, height, rate = stream.width, stream.height, stream.average_rate or stream.guessed_rate
            if not width or not height:
                raise ValueError(f"a video's frames have no size, or more than {MOST_PIXELS} pixels each")
            check_frames(max(1, stream.frames), width, height)
            _check_seconds((container.duration or 0) / 1e6)
            count = _count(container, stream)
        if count == 0:
            raise ValueError("a video file has no frame")
        if not rate:
            raise ValueError("a video file does not say how many frames a second has")
        _check_seconds(count / float(rate))
        self._size = width, height
        self.metadata: dict[str, Any] = {
            "total_num_frames": count,
            "fps": float(rate),
            "width": width,
            "height": height,
            "duration": count / float(rate),
            "video_backend": "pyav",
        }
        indices = sampling.indices(self.metadata)
        self.metadata["frames_indices"] = indices
        if (pixels := (max(indices) + 1) * width * height) > MOST_DECODED_PIXELS:
            raise ValueError(
                f"a video of {count} frames of {width} x {height} pixels is too large: {pixels} pixels would "
                f"be decoded, and {MOST_DECODED_PIXELS} may be: send a shorter one, or a smaller one"
            )

    @property
    def nbytes(self) -> int:
        """See `OpenedMedium.nbytes`: three for each pixel of the sampled frames."""
        count = len(self.metadata["frames_indices"])
        return int(3 * count * self._size[0] * self._size[1])

    def decoded(self) -> Video:
        """See `OpenedMedium.decoded`: the sampled frames, upright."""
        places: dict[int, list[int]] = {}
        for row, place in enumerate(self.metadata["frames_indices"]):
            places.setdefault(place, []).append(row)
        video: Frames | None = None
        left, last = set(places), max(places)
        with _opened(self._data) as (container, stream):
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            for number, frame in enumerate(container.decode(stream)):
                if number in left:
                    pixels = self._upright(frame, number)
                    if video is None:
                        video = np.empty((len(self.metadata["frames_indices"]), *pixels.shape), np.uint8)
                    video[places[number]] = pixels
                    left.remove(number)
                if number >= last:
                    break
        if left or video is None:
            count = self.metadata["total_num_frames"]
            raise ValueError(f"a video is damaged: frame {min(left)} of {count} cannot be decoded")
        height, width = video.shape[1:3]
        return Video(video, {**self.metadata, "width": width, "height": height})

    def _upright(self, frame: VideoFrame, number: int) -> Frames:
        if (frame.width, frame.height) != self._size:
            raise ValueError(
                f"frame {number} of a video has {frame.width} x {frame.height} pixels, and its file says "
                f"{self._size[0]} x {self._size[1]}"
            )
        if frame.is_corrupt:
            raise ValueError(f"a video is damaged at frame {number}")
        return np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)


def _count(container: InputContainer, stream: VideoStream) -> int:
    """Returns the number of frames, which some containers do not say, and others say wrongly.

    Raises:
        ValueError: there are too many, or fewer than the container says.
    """
    count = 0
    for packet in container.demux(stream):
        count += bool(packet.size) and not packet.is_discard
        if count > MOST_FRAMES:
            raise ValueError(f"a video file may have {MOST_FRAMES} frames, and this one has more: cut it")
    if count < stream.frames:
        raise ValueError(f"a video file is cut off: it says {stream.frames} frames, and {count} are there")
    return count


def _check_seconds(seconds: float) -> None:
    if seconds > MOST_SECONDS:
        raise ValueError(f"a video of {seconds:.0f} seconds is too long; it may have {MOST_SECONDS}: cut it")


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens the container of a file, and its first video stream.

    Raises:
        ValueError: FFmpeg cannot read it, now or while the context lasts.
    """
    import av

    known = "MP4, MOV, WebM, Matroska, GIF, AVI"
    try:
        with av.open(io.BytesIO(data), "r", options=_OPTIONS) as container:
            if not container.streams.video:
                raise ValueError("a video file has no video: it may be one of sound alone")
            yield container, container.streams.video[0]
    except av.error.FFmpegError as error:
        raise ValueError(
            f"a video file cannot be read: it is damaged, or none of {known} ({error.strerror})"
        ) from error
