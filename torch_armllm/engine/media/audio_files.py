"""Reading of audio files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from torch_armllm.system.extras import require_extra

MOST_SECONDS = 3600.0
"""Longest audio of a transcription: an hour of it takes 230 MB at 16 kHz."""
RATES = 1000, 768_000
"""Samples a second that a file may claim.  At fewer a few bytes are minutes, which resampling enlarges."""
MOST_CHANNELS = 64
_MOST_LEVEL = 1000.0
"""Largest sample that is accepted: mixes of floats pass full scale, and integers that were not scaled pass it
by far."""
_SAMPLES = 1 << 18
"""Samples that are decoded at once, of all channels: a small file of hours of silence takes little memory."""


def require_audio() -> None:
    """Raises ImportError unless the packages that read audio are installed."""
    for package in ("soundfile", "soxr"):
        require_extra(package, "audio", "audio")


def read_audio(data: bytes, rate: int, most_seconds: float = MOST_SECONDS) -> NDArray[np.float32]:
    """Decodes an audio file; see `AudioFile`.

    Args:
        data: the file.
        rate: samples a second of the result.
        most_seconds: longest audio that is accepted.
    """
    return AudioFile(data).decoded(rate, most_seconds)


class AudioFile:
    """An audio file of any format that libsndfile reads: WAV, FLAC, Ogg, MP3, …; its header is read at once.

    Args:
        data: the file.

    Attributes:
        format: libsndfile's name, such as ``WAV``.

    Raises:
        ValueError: the file is no audio, or has a rate or channels that audio does not have.
        ImportError: the extra ``audio`` is not installed.
    """

    def __init__(self, data: bytes) -> None:
        require_audio()
        import soundfile

        if not data:
            raise ValueError("the audio file is empty")
        with _errors():
            self._file = soundfile.SoundFile(io.BytesIO(data))
            self.format = str(self._file.format)
        check_rate(self._file.samplerate)
        if self._file.channels > MOST_CHANNELS:
            raise ValueError(
                f"the audio has {self._file.channels} channels, and may have {MOST_CHANNELS}: mix them"
            )

    @property
    def seconds(self) -> float | None:
        """Length by the header, which may be wrong where a program wrote to a pipe; None: it says none."""
        frames = int(self._file.frames)
        return frames / self._file.samplerate if 0 < frames < 2**62 else None

    def decoded(self, rate: int, most_seconds: float) -> NDArray[np.float32]:
        """Decodes the file, once.

        Args:
            rate: samples a second of the result.
            most_seconds: longest audio that is accepted, whatever the header says.

        Returns:
            float32 ``(samples,)``: the mean of all channels, resampled.

        Raises:
            ValueError: it is damaged, holds no samples or some that are not finite, or is too long.
        """
        import soxr

        parts: list[NDArray[np.float32]] = []
        frames = 0
        with _errors(), self._file as file:
            own = file.samplerate
            resampling = soxr.ResampleStream(own, rate, 1, dtype="float32") if own != rate else None
            # `blocks` would go on to what the header says, with memory that nobody wrote
            while len(block := file.read(_SAMPLES // file.channels, dtype="float32", always_2d=True)):
                frames += len(block)
                if frames > most_seconds * own:
                    raise ValueError(
                        f"the audio is longer than {most_seconds:g} seconds, which is the most: cut it"
                    )
                mono = block.mean(1, dtype=np.float32)
                parts.append(mono if resampling is None else resampling.resample_chunk(mono))
            if resampling is not None:
                parts.append(resampling.resample_chunk(np.zeros(0, np.float32), last=True))
        samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        if self.seconds is not None and 0 < frames < (self.seconds - 1.0) * own:  # lossy formats are padded
            raise ValueError(
                f"the audio ends after {frames / own:g} of the {self.seconds:g} seconds that its header "
                "says: the file is cut off, or damaged"
            )
        check_samples(samples)
        return samples


def resampled(samples: NDArray[np.float32], own: int, rate: int) -> NDArray[np.float32]:
    """Returns samples ``(n,)`` of a rate at another one; raises ImportError without the extra ``audio``."""
    require_audio()
    import soxr

    found: NDArray[np.float32] = soxr.resample(samples, own, rate)
    return found


def check_rate(rate: int) -> None:
    """Raises ValueError unless audio may have so many samples a second."""
    least, most = RATES
    if not least <= rate <= most:
        raise ValueError(
            f"the audio has {rate} samples a second; it may have {least} to {most}: convert it to 16000"
        )


def check_samples(samples: NDArray[np.float32]) -> None:
    """Raises ValueError if there are no samples, or some are not finite, or far from full scale."""
    if not len(samples):
        raise ValueError("the audio has no samples")
    peak = float(np.abs(samples).max())
    if not math.isfinite(peak):
        raise ValueError("the audio holds samples that are not finite numbers")
    if peak > _MOST_LEVEL:
        raise ValueError(
            f"the audio holds samples of up to {peak:g}, and full scale is 1: it is damaged, or not scaled"
        )


@contextmanager
def _errors() -> Iterator[None]:
    """Turns errors of libsndfile into those of the file."""
    import soundfile

    try:
        yield
    except (soundfile.LibsndfileError, RuntimeError) as error:
        # without the name of the file, which has none
        reason = getattr(error, "error_string", "") or f"libsndfile's error {getattr(error, 'code', error)}"
        raise ValueError(
            f"the file is no audio that can be decoded ({reason}): send WAV, FLAC, Ogg or MP3"
        ) from error
