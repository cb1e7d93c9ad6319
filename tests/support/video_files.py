"""Video files that are made here."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

CODECS = {
    "mp4": ("libx264", "yuv420p"),
    "mov": ("mpeg4", "yuv420p"),
    "webm": ("libvpx-vp9", "yuv420p"),
    "matroska": ("ffv1", "bgr0"),
    "gif": ("gif", "rgb8"),
    "avi": ("mpeg4", "yuv420p"),
}
"""Codec and pixel format of the files of each container."""


def shades(count: int, width: int = 64, height: int = 48) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns frames of one shade each, the upper half darker, of which no two neighbors are alike."""
    levels = 40 + np.arange(count) * 37 % 180
    frames = np.repeat(levels, height * width * 3).reshape(count, height, width, 3).astype(np.uint8)
    frames[:, : height // 2] //= 2
    return frames


def video_bytes(
    frames: np.ndarray[Any, np.dtype[np.uint8]], container: str = "mp4", rate: int = 10, audio: bool = False
) -> bytes:
    """Returns a video file.

    Args:
        frames: ``(n, height, width, 3)``; none: a file without video.
        container: of `CODECS`.
        rate: frames a second.
        audio: add a second of silence.
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = None
        if len(frames):
            codec, form = CODECS[container]
            stream = output.add_stream(codec, rate=rate)
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = form
        if audio:
            sound: Any = output.add_stream("aac", rate=8000, layout="mono")
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
            silence.sample_rate = 8000
            output.mux([*sound.encode(silence), *sound.encode(None)])
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if stream is not None:
            output.mux(stream.encode(None))
    return file.getvalue()


def video_file(path: Path, frames: np.ndarray[Any, np.dtype[np.uint8]], **options: Any) -> Path:
    """Writes a video file; see `video_bytes`."""
    path.write_bytes(video_bytes(frames, **options))
    return path


class EveryThird:
    """A video processor that takes every third frame."""

    class valid_kwargs:
        do_sample_frames: bool
        num_frames: int
        fps: float
        device: str

    do_sample_frames = True
    fps = 2.0

    def sample_frames(self, metadata: Any, num_frames: int | None, fps: float | None) -> Any:
        if num_frames is not None:
            return np.linspace(0, metadata.total_num_frames - 1, num_frames).astype(int)
        assert fps is not None
        return np.arange(0, metadata.total_num_frames, 3 if fps == 2.0 else 1)
