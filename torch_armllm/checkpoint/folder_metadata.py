"""All files of a quantized folder except its weights."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from torch_armllm.checkpoint.float_checkpoint import FloatCheckpoint
from torch_armllm.quant.config import ArmInt4Config
from torch_armllm.system.inner_paths import is_inner

logger = logging.getLogger(__name__)

_MODULE_FOLDER = re.compile(r"\d+_[A-Z]\w*")
"""Names of the folders of sentence-transformers, such as 1_Pooling."""


def write_metadata(model: Any, source: FloatCheckpoint, out: Path, quantization: ArmInt4Config) -> None:
    """Writes everything but the weights; config.json last, since it makes the folder a model."""
    for file in source.metadata:
        if file.name != "config.json":
            if not is_inner(file, source.folder):
                logger.warning("%s is a link: the new folder has a copy of %s", file, file.resolve())
            shutil.copyfile(file, out / file.name)
    for folder in source.folder.iterdir():
        if folder.is_dir() and _MODULE_FOLDER.fullmatch(folder.name):
            shutil.copytree(folder, out / folder.name, dirs_exist_ok=True)
    if not (out / "generation_config.json").exists():
        GenerationConfig.from_model_config(model.config).save_pretrained(out)
    model.config.architectures = [type(model).__name__]
    model.config.quantization_config = quantization
    model.config.save_pretrained(out)
