"""Videos of messages: files, lists of images, and images in one URL."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra vision")

from PIL import Image  # noqa: E402

from tests.support.video_files import EveryThird, shades, video_bytes, video_file  # noqa: E402
from torch_armllm.engine.media import video_clips  # noqa: E402
from torch_armllm.engine.media.media import open_media, with_media  # noqa: E402
from torch_armllm.engine.media.media_access import MediaAccess  # noqa: E402
from torch_armllm.engine.media.taken_media import TakenMedia  # noqa: E402
from torch_armllm.engine.media.video import Video  # noqa: E402

TAKEN = TakenMedia("Tiny", {"video": 2}, video_processor=EveryThird())


def image_url(frame: np.ndarray[Any, Any], kind: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def file_url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def message(*values: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video_url", "video_url": value} for value in values]}]


def read(value: Any, access: MediaAccess | None = None) -> Video:
    converted, media = with_media(message(value), access or MediaAccess(), TAKEN)
    assert converted == [{"role": "user", "content": [{"type": "video"}]}]
    (video,) = media["video"]
    return video  # type: ignore[no-any-return]


def test_a_list_of_images_is_taken_whole() -> None:
    frames = shades(4)
    video = read({"url": [image_url(frame) for frame in frames], "fps": 2.0})
    assert np.array_equal(video.frames, frames)
    assert (video.metadata["fps"], video.metadata["duration"]) == (2.0, 2.0)
    assert video.metadata["frames_indices"] == [0, 1, 2, 3]


def test_images_with_commas_between_are_the_same() -> None:
    urls = [image_url(frame, "JPEG") for frame in shades(3)]
    joined = "data:video/jpeg;base64," + ",".join(url.partition(",")[2] for url in urls)
    assert np.array_equal(read({"url": joined}).frames, read({"url": urls}).frames)
    assert read(joined).metadata["fps"] is None


def test_a_file_is_sampled_and_its_bytes_count(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="needs the extra video")
    data = video_bytes(shades(10))
    path = video_file(tmp_path / "film.mp4", shades(10))
    by_file = read({"url": path.as_uri()}, MediaAccess(tmp_path))
    assert np.array_equal(read({"url": file_url(data)}).frames, by_file.frames)
    assert by_file.metadata["frames_indices"] == [0, 3, 6, 9]
    assert len(read({"url": file_url(data), "num_frames": 2}).frames) == 2
    with pytest.raises(ValueError, match="may take at most 36863 bytes together"):
        open_media(message({"url": file_url(data)}), MediaAccess(), TAKEN, 4 * 3 * 64 * 48 - 1)


@pytest.mark.parametrize("value", [shades(3), (shades(3), {"fps": 4.0}), list(shades(3))])
def test_frames_of_a_caller(value: Any) -> None:
    given = [{"role": "user", "content": [{"type": "video", "video": value}]}]
    (video,) = with_media(given, MediaAccess(), TAKEN)[1]["video"]
    assert np.array_equal(video.frames, shades(3))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "a video_url part needs"),
        ({"url": ""}, "a video_url part needs"),
        ({"url": [1]}, "a video_url part needs"),
        ({"url": []}, "a list of 1 to 1024 images"),
        ({"url": ["data:image/png;base64,AAAA"] * 1025}, "a list of 1 to 1024 images"),
        ({"url": "data:video/jpeg;base64," + "AAAA," * 2000}, "a list of 1 to 1024 images"),
        ({"url": "data:video/jpeg;base64,"}, "an image cannot be read"),
        ({"url": [image_url(shades(1)[0])], "num_frames": 1}, "num_frames samples a video file"),
        ({"url": [image_url(shades(1)[0]), image_url(shades(1, 32)[0])]}, "64 x 48 and 32 x 48 pixels"),
        ({"url": [image_url(shades(1, 4)[0])]}, "4 x 48 pixels are too small"),
        ({"url": "data:video/mp4;base64,AAAA", "fps": "2"}, "the fps of a video are '2'"),
        ({"url": "data:video/mp4;base64,AAAA", "fps": True}, "the fps of a video are True"),
        ({"url": "data:video/mp4;base64,AAAA", "num_frames": 0}, "the num_frames of a video are 0"),
        ({"url": "data:video/mp4;base64,AAAA", "num_frames": 1.5}, "the num_frames of a video are 1.5"),
        ({"url": "data:video/mp4;base64,AAAA", "num_frames": 2, "fps": 2}, "fps and num_frames: give one"),
        ({"url": "file:///etc/passwd"}, "file URLs are not allowed"),
        ({"url": ["file:///etc/passwd"]}, "file URLs are not allowed"),
        ({"url": "http://example.org/a.mp4"}, "is not fetched from 'example.org'"),
        ({"url": "ftp://example.org/a.mp4"}, "is not read from ftp URLs"),
    ],
)
def test_others_are_refused(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_media(message(value), MediaAccess(), TAKEN)


def test_an_offline_part_without_a_video_is_refused() -> None:
    with pytest.raises(ValueError, match="a video part needs"):
        open_media([{"role": "user", "content": [{"type": "video"}]}], MediaAccess(), TAKEN)


def test_images_of_a_video_have_a_size_together(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [image_url(frame) for frame in shades(3)]
    sizes = [len(base64.b64decode(url.partition(",")[2])) for url in urls]
    monkeypatch.setattr(video_clips, "_MOST_BYTES", sum(sizes) - 1)
    assert len(read({"url": urls[:2]}).frames) == 2
    with pytest.raises(ValueError, match="may have 0 MiB together: send fewer"):
        read({"url": urls})
