"""Videos of prompts: files and lists of images in messages, and frames of callers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.media.taken_media import TakenMedia
from torch_armllm.engine.media.video import Video, as_video, check_fps
from torch_armllm.engine.media.video_files import VideoFile
from torch_armllm.engine.media.video_frames import VideoFrames
from torch_armllm.engine.media.video_sampling import VideoSampling

MOST_SENT_FRAMES = 1024
"""Images of a video that is a list of them."""
_MOST_BYTES = 1 << 26
"""Of their files together."""
_FRAMES, _FRAME = "data:video/jpeg;base64,", "data:image/jpeg;base64,"


class GivenVideo(NamedTuple):
    """Frames of an offline call; see `as_video`."""

    value: Any

    @property
    def nbytes(self) -> int:
        """See `OpenedMedium.nbytes`."""
        return 0

    def decoded(self) -> Video:
        """See `OpenedMedium.decoded`."""
        return as_video(self.value)


def given_video(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> GivenVideo:
    """Returns the video of an offline part ``{"type": "video", "video": frames or (frames, metadata)}``.

    Raises:
        ValueError: there is none.
    """
    if part.get("video") is None:
        raise ValueError('a video part needs {"video": frames} or {"video": (frames, metadata)}')
    return GivenVideo(part["video"])


def video_of_url(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> VideoFile | VideoFrames:
    """Opens the video of a part ``{"type": "video_url", "video_url": {"url": …}}``.

    The URL is that of a file, or there is a list of those of images, or ``data:video/jpeg;base64,`` and
    images with commas between.  ``fps`` or ``num_frames`` beside the URL of a file say which of its frames
    are taken; ``fps`` beside images is their rate.

    Raises:
        ValueError: the part has another form, or something cannot be read, may not be, or is too large.
        ImportError: the extra ``video`` is not installed.
    """
    value = part.get("video_url")
    given = value if isinstance(value, Mapping) else {"url": value}
    url, fps, count = given.get("url"), given.get("fps"), given.get("num_frames")
    check_fps(fps)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"the num_frames of a video are {count!r}: give a number of frames, as 16")
    if isinstance(url, str) and url[: len(_FRAMES)].lower() == _FRAMES:
        url = [_FRAME + body for body in url[len(_FRAMES) :].split(",", MOST_SENT_FRAMES)]
    if isinstance(url, str) and url:
        if fps is not None and count is not None:
            raise ValueError("a video has fps and num_frames: give one of them")
        return VideoFile(access.read(url, "video"), VideoSampling(taken.video_processor, count, fps))
    if not isinstance(url, list) or not all(isinstance(one, str) and one for one in url):
        raise ValueError(
            'a video_url part needs {"video_url": {"url": "data:video/mp4;base64,…"}}, or a list of images '
            'as "url"'
        )
    if count is not None:
        raise ValueError("num_frames samples a video file, and this video is images, all of which are taken")
    if not 0 < len(url) <= MOST_SENT_FRAMES:
        raise ValueError(f"a video may be a list of 1 to {MOST_SENT_FRAMES} images: send a file instead")
    return VideoFrames(_read(url, access), fps)


def _read(urls: Sequence[str], access: MediaAccess) -> list[bytes]:
    files: list[bytes] = []
    size = 0
    for url in urls:
        files.append(access.read(url, "image"))
        size += len(files[-1])
        if size > _MOST_BYTES:
            raise ValueError(f"the images of a video may have {_MOST_BYTES >> 20} MiB together: send fewer")
    return files
