"""Sound of prompts: files of messages, and arrays of callers."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_armllm.engine.media.audio_files import AudioFile, check_rate, check_samples, resampled
from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.media.taken_media import TakenMedia

_FORMATS = {
    "wav": ("WAV", "WAVEX", "RF64", "W64"),
    "flac": ("FLAC",),
    "mp3": ("MP3", "MPEG"),
    "ogg": ("OGG",),
    "opus": ("OGG",),
    "vorbis": ("OGG",),
    "aiff": ("AIFF",),
    "au": ("AU",),
    "caf": ("CAF",),
}
"""libsndfile's names of formats by those that requests give."""


class AudioClip(NamedTuple):
    """A file of sound in a message, of which the header was read.

    Attributes:
        file: the file.
        rate: samples a second that the model takes.
        most_seconds: that it may have.
    """

    file: AudioFile
    rate: int
    most_seconds: float

    @property
    def nbytes(self) -> int:
        """See `OpenedMedium.nbytes`: float32 at the model's rate."""
        return 4 * math.ceil(self._seconds * self.rate)

    def decoded(self) -> NDArray[np.float32]:
        """See `OpenedMedium.decoded`."""
        return self.file.decoded(self.rate, self.most_seconds)

    @property
    def _seconds(self) -> float:
        """Seconds of its header and one more, as lossy formats are padded; or the most, if it says none."""
        most = self.most_seconds
        return most if self.file.seconds is None else min(self.file.seconds + 1.0, most)


class GivenAudio(NamedTuple):
    """Sound of an offline call.

    Attributes:
        value: see `checked_clip`.
        taken: what the model takes.
    """

    value: Any
    taken: TakenMedia

    @property
    def nbytes(self) -> int:
        """See `OpenedMedium.nbytes`."""
        return 0

    def decoded(self) -> NDArray[np.float32]:
        """See `OpenedMedium.decoded`."""
        return checked_clip(self.value, self.taken)


def checked_clip(value: Any, taken: TakenMedia) -> NDArray[np.float32]:
    """Returns an item of ``multi_modal_data["audio"]`` as samples at the rate of a model.

    Args:
        value: floats ``(samples,)`` from −1 to 1, at that rate; or ``(samples, own rate)``.
        taken: what the model takes.

    Raises:
        ValueError: it is something else, too long, empty or not finite.
        ImportError: it has another rate, and the extra ``audio`` is not installed.
    """
    own: Any = taken.audio_rate
    if isinstance(value, tuple) and len(value) == 2:
        value, own = value
        if isinstance(own, bool) or not isinstance(own, (int, np.integer)):
            raise ValueError(f"the rate of an audio clip is {own!r}: give samples a second as an int")
        check_rate(int(own))
    form = "give floats of one channel, (samples,), or (samples, rate)"
    try:
        samples = np.asarray(value)
    except Exception as error:
        raise ValueError(f"an audio clip is a {type(value).__name__}: {form}") from error
    if samples.dtype.kind != "f" or samples.ndim != 1:
        raise ValueError(f"an audio clip is {samples.dtype} of shape {samples.shape}: {form}")
    _check_seconds(len(samples) / own, taken)
    check_samples(samples := samples.astype(np.float32, copy=False))
    return samples if own == taken.audio_rate else resampled(samples, int(own), taken.audio_rate)


def audio_of_url(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> AudioClip:
    """Opens the file of a part ``{"type": "audio_url", "audio_url": {"url": …}}``.

    Raises:
        ValueError: it cannot be read or may not be, is no sound, or is too long by its header.
    """
    value = part.get("audio_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise ValueError('an audio_url part needs {"audio_url": {"url": "data:audio/wav;base64,…"}}')
    return _clip(access.read(url, "audio"), taken)


def audio_of_base64(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> AudioClip:
    """Opens the file of a part ``{"type": "input_audio", "input_audio": {"data": …, "format": …}}``.

    Raises:
        ValueError: it is no base64, no sound, another format than the part says, or too long by its header.
    """
    value = part.get("input_audio")
    text = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(text, str) or not text:
        raise ValueError('an input_audio part needs {"input_audio": {"data": "…base64…", "format": "wav"}}')
    named = str(value.get("format") or "").lower()
    if named and named not in _FORMATS:
        raise ValueError(f"the format of an input_audio is {named[:20]!r}: send {', '.join(_FORMATS)}")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data of an input_audio is no base64: {error}") from error
    clip = _clip(data, taken)
    if named and clip.file.format not in _FORMATS[named]:
        raise ValueError(
            f"an input_audio says that its format is {named!r}, and its data is {clip.file.format}: "
            "name the format that it has"
        )
    return clip


def given_audio(part: Mapping[str, Any], access: MediaAccess, taken: TakenMedia) -> GivenAudio:
    """Returns the sound of an offline part ``{"type": "audio", "audio": samples or (samples, rate)}``.

    Raises:
        ValueError: there is none.
    """
    if part.get("audio") is None:
        raise ValueError('an audio part needs {"audio": samples} or {"audio": (samples, rate)}')
    return GivenAudio(part["audio"], taken)


def _clip(data: bytes, taken: TakenMedia) -> AudioClip:
    file = AudioFile(data)
    if file.seconds is not None:
        _check_seconds(file.seconds, taken)
    return AudioClip(file, taken.audio_rate, taken.audio_seconds)


def _check_seconds(seconds: float, taken: TakenMedia) -> None:
    if seconds > taken.audio_seconds:
        raise ValueError(
            f"the audio is {seconds:g} seconds long, and max_audio_seconds allows {taken.audio_seconds:g}: "
            "cut it, or raise it"
        )
