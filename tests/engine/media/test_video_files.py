"""Video files: sampled frames are the right ones, and bad files say what is wrong."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra vision")
av = pytest.importorskip("av", reason="needs the extra video")

from tests.support.video_files import CODECS, EveryThird, shades, video_bytes  # noqa: E402
from torch_armllm.engine.media import video_files  # noqa: E402
from torch_armllm.engine.media.video_files import VideoFile  # noqa: E402
from torch_armllm.engine.media.video_sampling import VideoSampling  # noqa: E402

SAMPLING = VideoSampling(EveryThird())


@pytest.mark.parametrize("container", CODECS)
def test_sampled_frames_are_those_of_their_places(container: str) -> None:
    frames = shades(20)
    file = VideoFile(video_bytes(frames, container), SAMPLING)
    assert file.nbytes == 7 * 64 * 48 * 3
    video = file.decoded()
    assert video.frames.shape == (7, 48, 64, 3)
    assert video.metadata["frames_indices"] == [0, 3, 6, 9, 12, 15, 18]
    assert (video.metadata["total_num_frames"], video.metadata["fps"]) == (20, 10.0)
    assert video.metadata["duration"] == 2.0
    within = (slice(None), slice(30, 40), slice(8, 56))
    found, wanted = video.frames[within].mean((1, 2)), frames[::3][within].mean((1, 2))
    assert np.abs(found - wanted).max() < (40 if container == "gif" else 6)
    assert (video.frames[:, 8:16].mean((1, 2, 3)) < found.mean(1) - 8).all()


def test_a_frame_may_be_taken_twice() -> None:
    class Twice(EveryThird):
        def sample_frames(self, metadata: Any, num_frames: int | None, fps: float | None) -> list[int]:
            return [1, 4, 4]

    video = VideoFile(video_bytes(shades(6)), VideoSampling(Twice())).decoded()
    assert video.metadata["frames_indices"] == [1, 4, 4]
    assert np.array_equal(video.frames[1], video.frames[2])
    assert not np.array_equal(video.frames[0], video.frames[1])


@pytest.mark.parametrize(
    ("options", "count"), [({"num_frames": 5}, 5), ({"fps": 1.0}, 20), ({}, 7)], ids=["number", "rate", "own"]
)
def test_callers_choose_number_or_rate(options: dict[str, Any], count: int) -> None:
    file = VideoFile(video_bytes(shades(20)), VideoSampling(EveryThird(), **options))
    assert len(file.metadata["frames_indices"]) == count


def test_a_processor_that_does_not_sample_gets_every_frame() -> None:
    class Whole(EveryThird):
        do_sample_frames = False

    assert len(VideoFile(video_bytes(shades(5)), VideoSampling(Whole())).decoded().frames) == 5


def test_frames_are_turned_upright() -> None:
    data = video_bytes(shades(4))
    plain = VideoFile(data, SAMPLING).decoded()
    straight = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # clockwise
    at = data.index(straight, data.index(b"tkhd"))
    video = VideoFile(data[:at] + turned + data[at + len(turned) :], SAMPLING).decoded()
    assert video.frames.shape == (2, 64, 48, 3)
    assert (video.metadata["width"], video.metadata["height"]) == (48, 64)
    assert np.array_equal(video.frames, np.rot90(plain.frames, -1, (1, 2)))


class TestBadFiles:
    """Each is refused when it is opened, but for damage within frames."""

    LISTS: ClassVar = {
        "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "concatenation": b"ffconcat version 1.0\nfile /etc/passwd\n",
        "text": b"this is no video" * 99,
        "nothing": b"",
        "png": b"\x89PNG\r\n\x1a\n" + bytes(99),
    }

    @pytest.mark.parametrize("name", LISTS)
    def test_others_than_videos(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"cannot be read: it is damaged, or none of MP4"):
            VideoFile(self.LISTS[name], SAMPLING)

    def test_sound_alone(self) -> None:
        with pytest.raises(ValueError, match="has no video: it may be one of sound alone"):
            VideoFile(video_bytes(shades(0), audio=True), SAMPLING)

    def test_sound_beside_frames_is_left_out(self) -> None:
        assert len(VideoFile(video_bytes(shades(7), audio=True), SAMPLING).decoded().frames) == 3

    @pytest.mark.parametrize("part", [0.3, 0.9])
    def test_cut_off(self, part: float) -> None:
        data = video_bytes(shades(30))
        with pytest.raises(ValueError, match=r"cannot be read|it says 30 frames, and 0 are there"):
            VideoFile(data[: int(len(data) * part)], SAMPLING)

    def test_damaged_within(self) -> None:
        data = bytearray(video_bytes(shades(12)))
        with av.open(io.BytesIO(data)) as container:
            at = [packet.pos for packet in container.demux(video=0)][5]
        assert at is not None
        data[at : at + 8] = b"\xff" * 8
        file = VideoFile(bytes(data), SAMPLING)
        with pytest.raises(ValueError, match="damaged"):
            file.decoded()

    def test_frames_of_another_size_than_the_header_says(self) -> None:
        file = io.BytesIO()
        with av.open(file, "w", format="mov") as output:
            stream: Any = output.add_stream("mjpeg", rate=10)
            other: Any = av.CodecContext.create("mjpeg", "w")
            for encoder, (width, height) in ((stream, (64, 48)), (other, (640, 480))):
                encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
                encoder.time_base = Fraction(1, 10)
            for number, encoder in enumerate((stream, stream, other, stream)):
                shape = encoder.height, encoder.width, 3
                frame = av.VideoFrame.from_ndarray(np.zeros(shape, np.uint8), format="rgb24")
                frame.pts = number
                for packet in encoder.encode(frame):
                    packet.stream = stream
                    output.mux(packet)
        opened = VideoFile(file.getvalue(), VideoSampling(EveryThird(), num_frames=4))
        with pytest.raises(
            ValueError, match="frame 2 of a video has 640 x 480 pixels, and its file says 64 x"
        ):
            opened.decoded()

    @pytest.mark.parametrize(("width", "height"), [(6, 64), (2000, 8)])
    def test_sides(self, width: int, height: int) -> None:
        with pytest.raises(ValueError, match=r"too (small|narrow)"):
            VideoFile(video_bytes(shades(2, width, height), "matroska"), SAMPLING)

    @pytest.mark.parametrize(
        ("name", "most", "message"),
        [
            ("MOST_FRAMES", 19, "may have 19 frames, and this one has more: cut it"),
            ("MOST_SECONDS", 1, "a video of 2 seconds is too long; it may have 1: cut it"),
            ("MOST_DECODED_PIXELS", 19 * 64 * 48 - 1, "58368 pixels would be decoded"),
            ("_OPTIONS", {**video_files._OPTIONS, "max_pixels": "99"}, "no size, or more than"),
        ],
    )
    def test_too_much(self, name: str, most: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        data = video_bytes(shades(20), "mov")
        VideoFile(data, SAMPLING)
        monkeypatch.setattr(video_files, name, most)
        with pytest.raises(ValueError, match=message):
            VideoFile(data, SAMPLING)

    def test_what_the_processor_cannot_sample(self) -> None:
        class Pairs(EveryThird):
            def sample_frames(self, metadata: Any, num_frames: int | None, fps: float | None) -> list[int]:
                return list(range(0, metadata.total_num_frames, metadata.total_num_frames // 2))

        with pytest.raises(ValueError, match=r"Pairs cannot sample a video of 1 frames, 0.1 seconds: range"):
            VideoFile(video_bytes(shades(1)), VideoSampling(Pairs()))

    def test_samples_beyond_the_end(self) -> None:
        class Beyond(EveryThird):
            def sample_frames(self, metadata: Any, num_frames: int | None, fps: float | None) -> list[int]:
                return [metadata.total_num_frames]

        with pytest.raises(ValueError, match="samples no frames of a video of 3 frames"):
            VideoFile(video_bytes(shades(3)), VideoSampling(Beyond()))
