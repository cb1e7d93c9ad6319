"""Images, videos and sound of tiny models: which of them the product takes, and why not the others."""

from __future__ import annotations

from typing import Any

from torch_armllm.engine.images.build import tried_media
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config
from torch_armllm.model_survey.tiny_processors import MODALITIES, modalities, model_kind, tiny_multimodal
from torch_armllm.patching.state import patch_state

MEDIA = "texts and images, videos or sound"
TAKEN = "yes"


def tiny_with_processor(family: str) -> tuple[Any, Any, str]:
    """Returns a tiny model of a family, its processor or None, and why it has none.

    Args:
        family: a ``model_type`` of `multimodal_families`.
    """
    try:
        return *tiny_multimodal(family), ""
    except Exception as error:  # noqa: BLE001 - a model without its processor still reads texts
        return build_tiny(model_kind(), tiny_config(family)), None, f"{type(error).__name__}: {error}"


def media_of(model: Any, processor: Any, why: str = "") -> dict[str, str]:
    """Returns `TAKEN`, or the reason why not, for each of what a family's processor takes.

    The product itself is asked: it tries a made image, video and sound against the model's own modules.

    Args:
        model: a patched model.
        processor: its processor; None: it has none.
        why: the reason for that.
    """
    if processor is None:
        return {"image": why}
    names = modalities(processor)
    tried = tried_media(patch_state(model).kind, processor, dict.fromkeys(names, 1))
    if isinstance(tried, str):
        return dict.fromkeys(names, tried.partition("is served for text only: ")[2] or tried)
    reasons = tried.facts.reasons
    return {
        name: TAKEN if name in tried.facts.modalities else reasons.get(name, "its trial found none")
        for name in names
    }


def media_counts(media: list[dict[str, str]]) -> str:
    """Returns the counts of families by modality as a sentence."""
    counts = []
    for name, plural in zip(MODALITIES, ("images", "videos", "sound"), strict=True):
        answers = [each[name] for each in media if name in each]
        counts.append(f"{answers.count(TAKEN)} of {len(answers)} take {plural}")
    return ", ".join(counts)
