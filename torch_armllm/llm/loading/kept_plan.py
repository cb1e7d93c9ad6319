"""The plan of a folder that was just written, kept for its first start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torch_armllm.llm.llm import LLM
from torch_armllm.llm.loading.cached_loader import SETTING
from torch_armllm.system.host import free_memory

logger = logging.getLogger(__name__)

_SHARE = 0.5
"""Largest share of the free memory that a model may take to be loaded for its plan alone."""


def keep_plan(folder: Path) -> None:
    """Loads a quantized folder once, which writes its plan to the plan cache.

    A large model, one that an engine cannot serve and one without a tokenizer wait for their first start.

    Args:
        folder: a checkpoint that this package wrote.
    """
    size = sum(file.stat().st_size for file in folder.iterdir())
    if os.environ.get(SETTING) == "0" or size > _SHARE * free_memory():
        return
    try:
        LLM(str(folder), progress=False, runner="generate")
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        logger.info("no plan is kept for the first start: %s", error)
