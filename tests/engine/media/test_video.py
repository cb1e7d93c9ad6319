"""Frames of callers, with and without metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra vision")

from PIL import Image  # noqa: E402

from tests.support.video_files import shades  # noqa: E402
from torch_armllm.engine.media.video import Video, as_video, video_arguments  # noqa: E402


@pytest.mark.parametrize("kind", ["array", "tensor", "arrays", "images", "pair"])
def test_forms_of_frames(kind: str) -> None:
    frames = shades(3)
    given: Any = {
        "array": frames,
        "tensor": torch.from_numpy(frames),
        "arrays": list(frames),
        "images": [Image.fromarray(frame) for frame in frames],
        "pair": (frames, None),
    }[kind]
    video = as_video(given)
    assert np.array_equal(video.frames, frames)
    assert video.metadata["frames_indices"] == [0, 1, 2]
    assert (video.metadata["total_num_frames"], video.metadata["fps"]) == (3, None)
    assert as_video(video) is video


def test_metadata_places_frames_in_a_longer_video() -> None:
    places = {"fps": 10.0, "frames_indices": np.array([0, 5, 20]), "total_num_frames": 30}
    video = as_video((shades(3), places))
    assert video.metadata["frames_indices"] == [0, 5, 20]
    assert video.metadata["duration"] == 3.0
    arguments = video_arguments([video, as_video(shades(2))])
    assert [len(frames) for frames in arguments["videos"]] == [3, 2]
    assert [each["fps"] for each in arguments["video_metadata"]] == [10.0, None]
    assert arguments["do_sample_frames"] is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("film.mp4", "a video is a str: give"),
        ([], "a video of 0 frames is not read"),
        (np.zeros((0, 48, 64, 3), np.uint8), "a video of 0 frames is not read"),
        (np.zeros((2, 0, 64, 3), np.uint8), "64 x 0 pixels are too small"),
        (np.zeros((2, 3, 64, 3), np.uint8), "64 x 3 pixels are too small"),
        (np.zeros((1, 8, 2000, 3), np.uint8), "2000 x 8 pixels are too narrow"),
        (np.zeros((70_000, 8, 8, 3), np.uint8), "a video of 70000 frames is not read: give 1 to 65536"),
        (np.broadcast_to(np.uint8(0), (1, 8192, 8192, 3)), "8192 x 8192 pixels are too large"),
        (np.zeros((2, 48, 64, 3), np.float32), "in float32: give"),
        (np.zeros((2, 48, 64), np.uint8), r"the shape \(2, 48, 64\)"),
        ([shades(1)[0], shades(1, 32)[0]], "several sizes: give them one"),
        ((shades(2), {"fps": 0}), "the fps of a video are 0"),
        ((shades(2), {"fps": float("nan")}), "the fps of a video are nan"),
        ((shades(2), {"rate": 2}), "has no rate: give total_num_frames"),
        ((shades(2), {"frames_indices": [0]}), "the places of its 2 frames, in order"),
        ((shades(2), {"frames_indices": [3, 1]}), "the places of its 2 frames, in order"),
        ((shades(2), {"frames_indices": [-1, 1]}), "the places of its 2 frames, in order"),
        ((shades(2), {"total_num_frames": 1}), "total_num_frames is 1, and a frame of the video has the"),
    ],
)
def test_others_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_video(given)


def test_a_video_is_a_pair_as_vllm_takes_it() -> None:
    frames, metadata = Video(shades(1), {"fps": 1.0})
    assert as_video((frames, metadata)).metadata["fps"] == 1.0
