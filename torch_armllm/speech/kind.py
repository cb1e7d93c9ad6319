"""Recognition of models that transcribe."""

from __future__ import annotations

from torch_armllm.pooling.model_files import has_files, read_object

FAMILIES = ("whisper",)
"""Model types of transformers that `Transcriber` takes."""


def transcribes(model: str) -> bool:
    """True if a folder, or a name on the model hub, holds a model that transcribes."""
    return has_files(model) and read_object(model, "config.json").get("model_type") in FAMILIES
