"""Images, sound and videos that a model takes beside texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODALITIES = ("image", "audio", "video")
"""Keys of ``multi_modal_data`` and ``limit_mm_per_prompt``, and types of parts that chat templates read."""
DEFAULT_LIMITS: Mapping[str, int] = {"image": 8, "audio": 8, "video": 2}
"""Most of each modality in a prompt, unless ``limit_mm_per_prompt`` says otherwise."""
DEFAULT_AUDIO_SECONDS = 1800
"""Longest audio clip: models of sound that are known take 30 seconds to 40 minutes."""
PLURALS = {"image": "images", "audio": "audio clips", "video": "videos"}


@dataclass(frozen=True)
class TakenMedia:
    """Images, sound and videos that a model takes beside texts, and how many.

    Attributes:
        model: its name, for errors.
        limits: most of a prompt by modality, of those that it takes.
        refusals: whole errors that say why it takes none of a modality, where there is more to say.
        audio_rate: samples a second of the sound that it takes.
        audio_seconds: most of an audio clip.
        video_processor: its own, which samples the frames of videos.
    """

    model: str
    limits: Mapping[str, int]
    refusals: Mapping[str, str] = field(default_factory=dict)
    audio_rate: int = 16_000
    audio_seconds: float = DEFAULT_AUDIO_SECONDS
    video_processor: Any = None

    def check(self, counts: Mapping[str, int]) -> None:
        """Checks how many of each modality a prompt has.

        Raises:
            ValueError: more than ``limit_mm_per_prompt`` allows, or the model takes none.
        """
        for modality, count in counts.items():
            if count and modality not in self.limits:
                refusal = self.refusals.get(modality)
                raise ValueError(refusal or f"{self.model} takes no {PLURALS.get(modality, repr(modality))}")
            if count and count > (limit := self.limits[modality]):
                raise ValueError(
                    f"the prompt has {count} {PLURALS[modality]}, and limit_mm_per_prompt allows {limit}: "
                    "send fewer, or raise it"
                )
