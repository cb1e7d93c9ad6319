"""Reading of audio files."""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray

from torch_armllm.system.extras import require_extra

MOST_SECONDS = 3600.0
"""Longest audio of a call: an hour of it takes 230 MB at 16 kHz."""
RATES = 1000, 768_000
"""Samples a second that a file may claim.  At fewer a few bytes are minutes, which resampling enlarges."""
MOST_CHANNELS = 64
_SAMPLES = 1 << 18
"""Samples that are decoded at once, of all channels: a small file of hours of silence takes little memory."""


def require_audio() -> None:
    """Raises ImportError unless the packages that read audio are installed."""
    for package in ("soundfile", "soxr"):
        require_extra(package, "audio", "audio")


def read_audio(data: bytes, rate: int, most_seconds: float = MOST_SECONDS) -> NDArray[np.float32]:
    """Decodes an audio file of any format that libsndfile reads: WAV, FLAC, Ogg, MP3, ….

    Args:
        data: the file.
        rate: samples a second of the result.
        most_seconds: longest audio that is accepted.

    Returns:
        float32 ``(samples,)``: the mean of all channels, resampled.

    Raises:
        ValueError: the file is no audio, is damaged, holds none or numbers that are not finite, is too long,
            or has a rate or channels that audio does not have.
        ImportError: the extra ``audio`` is not installed.
    """
    require_audio()
    import soundfile
    import soxr

    if not data:
        raise ValueError("the audio file is empty")
    parts: list[NDArray[np.float32]] = []
    frames = 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            own = file.samplerate
            _check_header(own, file.channels)
            resampling = soxr.ResampleStream(own, rate, 1, dtype="float32") if own != rate else None
            for block in file.blocks(_SAMPLES // file.channels, dtype="float32", always_2d=True):
                frames += len(block)
                if frames > most_seconds * own:
                    raise ValueError(
                        f"the audio is longer than {most_seconds:g} seconds, which is the most: cut it"
                    )
                mono = block.mean(1, dtype=np.float32)
                parts.append(mono if resampling is None else resampling.resample_chunk(mono))
            if resampling is not None:
                parts.append(resampling.resample_chunk(np.zeros(0, np.float32), last=True))
    except (soundfile.LibsndfileError, RuntimeError) as error:
        reason = getattr(error, "error_string", error)  # without the name of the file, which has none
        raise ValueError(
            f"the file is no audio that can be decoded ({reason}): send WAV, FLAC, Ogg or MP3"
        ) from error
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(samples):
        raise ValueError("the audio has no samples")
    if not math.isfinite(float(np.abs(samples).sum())):
        raise ValueError("the audio holds samples that are not finite numbers")
    return samples


def _check_header(rate: int, channels: int) -> None:
    """Checks what a file says of itself, before anything is allocated for it.

    Its number of frames is not read: it may be wrong where a program has written the file to a pipe.

    Raises:
        ValueError: the rate or the channels are no audio's.
    """
    least, most = RATES
    if not least <= rate <= most:
        raise ValueError(
            f"the audio has {rate} samples a second; it may have {least} to {most}: convert it to 16000"
        )
    if channels > MOST_CHANNELS:
        raise ValueError(f"the audio has {channels} channels, and may have {MOST_CHANNELS}: mix them")
