"""Prompts by which a model is tried with an item of a modality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torch_armllm.engine.images.modalities import MODALITIES, sampling_rate
from torch_armllm.engine.media.video import as_video

_WIDTH, _HEIGHT, _FRAMES, _RATE = 96, 64, 4, 2.0
_BEFORE, _AFTER = "what is", "this one ?"


def trial_item(modality: str, processor: Any) -> Any:
    """Returns an item of random numbers: a wide image, frames that are as wide, or a second of sound."""
    random = np.random.default_rng(0)
    if modality == "audio":
        return random.normal(0, 0.1, sampling_rate(processor)).astype(np.float32)
    shape = (_HEIGHT, _WIDTH, 3)
    if modality == "video":
        return as_video((random.integers(0, 256, (_FRAMES, *shape), dtype=np.uint8), {"fps": _RATE}))
    from PIL import Image

    return Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))


def trial_texts(modality: str, processor: Any) -> Iterator[str]:
    """Yields texts that may hold the placeholder of an item; words follow it, which models tell apart.

    That of the processor's chat template comes first, then what its attributes name, then none.
    """
    if (rendered := _rendered(modality, processor)) is not None:
        yield rendered
    tokenizer = getattr(processor, "tokenizer", None)
    holders = (processor, tokenizer)
    marks = _named(holders, MODALITIES[modality].tokens)
    around = [
        (begin, end)
        for name in (modality, "vision")
        for begin in _named(holders, (f"{name}_start_token", f"{name}_bos_token", f"start_{name}_token"))
        for end in _named(holders, (f"{name}_end_token", f"{name}_eos_token", f"end_{name}_token"))
    ]
    for mark in marks:
        yield f"{_BEFORE} {mark} {_AFTER}"
        yield f"{mark}\n{_AFTER}"
        for begin, end in around:
            yield f"{_BEFORE} {begin}{mark}{end} {_AFTER}"
    yield f"{_BEFORE} {_AFTER}"


def _named(holders: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Returns the texts that attributes of a processor or its tokenizer hold, each once."""
    found = [getattr(holder, name, None) for name in names for holder in holders]
    return list(dict.fromkeys(mark for mark in found if isinstance(mark, str) and mark))


def _rendered(modality: str, processor: Any) -> str | None:
    template = getattr(processor, "chat_template", None)
    if template is None or not hasattr(processor, "apply_chat_template"):
        return None
    parts = [{"type": "text", "text": _BEFORE}, {"type": modality}, {"type": "text", "text": _AFTER}]
    try:
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
    except Exception:  # noqa: BLE001 - templates of checkpoints raise errors of any kind
        return None
    return text if isinstance(text, str) else None
