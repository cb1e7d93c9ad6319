"""Frames of a video that a model's own processor takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NOT_OF_SAMPLING = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
"""Options of a video processor that its method ``sample_frames`` is not called with."""


@dataclass(frozen=True)
class VideoSampling:
    """Samples frames as a video processor of transformers does.

    Attributes:
        processor: the model's video processor.
        num_frames: number of frames to take instead of its own.
        fps: frames to take per second, likewise.
    """

    processor: Any
    num_frames: int | None = None
    fps: float | None = None

    def indices(self, metadata: dict[str, Any]) -> list[int]:
        """Returns the places of the frames that are taken of a video.

        Args:
            metadata: of the whole video; see `Video`.

        Raises:
            ValueError: the processor cannot sample such a video.
        """
        from transformers.video_utils import VideoMetadata

        total = metadata["total_num_frames"]
        known = self.processor.valid_kwargs.__annotations__
        options = {name: getattr(self.processor, name, None) for name in known}
        if self.num_frames is not None or self.fps is not None:
            options |= {"num_frames": self.num_frames, "fps": self.fps}
        elif not options.get("do_sample_frames"):
            return list(range(total))
        given = {name: value for name, value in options.items() if name not in _NOT_OF_SAMPLING}
        try:
            sampled = self.processor.sample_frames(metadata=VideoMetadata(**metadata), **given)
            places = [int(place) for place in sampled]
        except Exception as error:  # it divides by what a short video has none of
            raise ValueError(
                f"{type(self.processor).__name__} cannot sample a video of {total} frames, "
                f"{metadata['duration']:.3g} seconds: {error}; give num_frames, or another video"
            ) from error
        if not places or not all(0 <= place < total for place in places):
            name = type(self.processor).__name__
            raise ValueError(f"{name} samples no frames of a video of {total} frames: give num_frames")
        return places
