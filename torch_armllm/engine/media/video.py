"""A video of a prompt: its frames, and when they were taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_armllm.engine.media.image_files import MOST_PIXELS, MOST_RATIO

Frames = np.ndarray[Any, np.dtype[np.uint8]]
MOST_FRAMES = 1 << 16
"""Frames of a video file, and of a video that the caller of an engine gives."""
LEAST_SIDE = 8
"""Of frames: processors take a side of 1, 3 or 4 for the channels."""
_METADATA = ("total_num_frames", "fps", "width", "height", "duration", "video_backend", "frames_indices")


class Video(NamedTuple):
    """The sampled frames of a video.

    Attributes:
        frames: ``(n, height, width, 3)`` in RGB.
        metadata: fields of transformers' ``VideoMetadata``, from which processors make timestamps: those of
            the whole video, and ``frames_indices``, the places of its frames in it.
    """

    frames: Frames
    metadata: dict[str, Any]


def as_video(given: Any) -> Video:
    """Returns the video that a caller gives.

    Args:
        given: a `Video`; or frames, ``(n, height, width, 3)`` in uint8 or a list of images; or a pair of
            frames and metadata, of which ``fps`` tells their rate, and ``frames_indices`` and
            ``total_num_frames`` their places in a longer video.

    Raises:
        ValueError: it has another form, or its frames another size than processors take.
    """
    if isinstance(given, Video):
        return given
    metadata: Any = {}
    if isinstance(given, tuple) and len(given) == 2 and (given[1] is None or isinstance(given[1], Mapping)):
        given, metadata = given[0], given[1] or {}
    frames = _stacked(given)
    check_frames(len(frames), frames.shape[2], frames.shape[1])
    return Video(frames, _completed(metadata, frames))


def check_frames(count: int, width: int, height: int) -> None:
    """Raises ValueError if a video has no frame, too many, or such as are too large, small or narrow."""
    if not 0 < count <= MOST_FRAMES:
        raise ValueError(f"a video of {count} frames is not read: give 1 to {MOST_FRAMES}")
    size = f"a video's frames of {width} x {height} pixels are too"
    if min(width, height) < LEAST_SIDE:
        raise ValueError(f"{size} small: give at least {LEAST_SIDE} x {LEAST_SIDE}")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise ValueError(f"{size} narrow; one side may be {MOST_RATIO} times the other: crop them")
    if width * height > MOST_PIXELS:
        raise ValueError(f"{size} large; they may have {MOST_PIXELS}: scale them down")


def check_fps(fps: Any) -> None:
    """Raises ValueError if a rate of frames is given and is none."""
    is_number = isinstance(fps, (int, float)) and not isinstance(fps, bool)
    if fps is not None and not (is_number and 0 < fps < float("inf")):
        raise ValueError(f"the fps of a video are {fps!r}: give frames per second, as 2.0")


def video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """Returns the arguments of a processor for videos whose frames are sampled already."""
    return {
        "videos": [video.frames for video in videos],
        "video_metadata": [dict(video.metadata) for video in videos],
        "do_sample_frames": False,
    }


def _stacked(given: Any) -> Frames:
    """Returns frames as one array."""
    if isinstance(given, (list, tuple)):
        check_frames(len(given), LEAST_SIDE, LEAST_SIDE)
        frames = [np.asarray(frame.convert("RGB") if hasattr(frame, "convert") else frame) for frame in given]
        if len({frame.shape for frame in frames}) > 1:
            raise ValueError("the frames of a video have several sizes: give them one")
        given = np.stack(frames)
    elif isinstance(given, torch.Tensor):
        given = given.numpy(force=True)
    form = "(frames, height, width, 3) in uint8, or a list of images"
    if not isinstance(given, np.ndarray):
        raise ValueError(f"a video is a {type(given).__name__}: give {form}")
    if given.ndim != 4 or given.shape[3] != 3 or given.dtype != np.uint8:
        raise ValueError(f"a video has the shape {given.shape} in {given.dtype}: give {form}")
    return given


def _completed(metadata: Mapping[str, Any], frames: Frames) -> dict[str, Any]:
    """Returns the metadata of a caller's frames, with those that follow from the frames."""
    if unknown := sorted(set(metadata) - set(_METADATA)):
        raise ValueError(f"the metadata of a video has no {', '.join(unknown)}: give {', '.join(_METADATA)}")
    count, fps = len(frames), metadata.get("fps")
    check_fps(fps)
    given = metadata.get("frames_indices")
    indices = list(range(count)) if given is None else [int(index) for index in given]
    if len(indices) != count or any(a > b for a, b in zip([0, *indices], indices, strict=False)):
        raise ValueError(f"frames_indices of a video must be the places of its {count} frames, in order")
    total = metadata.get("total_num_frames")
    total = indices[-1] + 1 if total is None else int(total)
    if total <= indices[-1]:
        raise ValueError(f"total_num_frames is {total}, and a frame of the video has the place {indices[-1]}")
    found = {
        "total_num_frames": total,
        "fps": fps,
        "width": frames.shape[2],
        "height": frames.shape[1],
        "duration": None if fps is None else total / fps,
        "frames_indices": indices,
    }
    return {**found, **{name: value for name, value in metadata.items() if name not in found}}
