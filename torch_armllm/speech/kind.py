"""Recognition of models that transcribe."""

from __future__ import annotations

from pathlib import Path

from torch_armllm.pooling.model_files import read_object

FAMILIES = ("whisper",)
"""Model types of transformers that `Transcriber` takes."""


def transcribes(model: str) -> bool:
    """True if a folder, or a name on the model hub, holds a model that transcribes."""
    path = Path(model).expanduser()
    if not path.is_dir() and ("/" not in model or path.exists()):  # the embedded model, or a single file
        return False
    return read_object(model, "config.json").get("model_type") in FAMILIES
