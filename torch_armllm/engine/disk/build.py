"""Opens the prefix cache on disk that an engine's settings name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.cached_rows import cached_rows
from torch_armllm.engine.speculative.build import reads_hidden_states
from torch_armllm.kv_cache.block_manager import BlockManager
from torch_armllm.kv_cache.disk.disk_cache import DiskPrefixCache
from torch_armllm.kv_cache.disk.folder import CacheFolder
from torch_armllm.plan.native import native_plan
from torch_armllm.system.files import format_bytes

_logger = logging.getLogger(__name__)


def build_disk_cache(
    name: str, config: EngineConfig, runner: Any, manager: BlockManager
) -> DiskPrefixCache | None:
    """Opens the folder of ``prefix_cache_dir``; None if there is none, or it is of no use to the model.

    Args:
        name: of the model.
        config: of the engine.
        runner: of the engine.
        manager: of its blocks.

    Raises:
        ValueError: the folder cannot be used, or other settings exclude it.
    """
    if config.prefix_cache_dir is None:
        return None
    if reads_hidden_states(config.speculative_config):
        raise ValueError(
            "prefix_cache_dir does not hold what MTP and EAGLE-3 layers keep of a prompt: leave it out, or "
            "choose another method in speculative_config"
        )
    if (reason := _why_not(runner, manager)) is not None:
        _logger.warning("%s: prefix_cache_dir has no effect, as %s", name, reason)
        return None
    blocks, states, own = cached_rows(runner)
    root, size = Path(config.prefix_cache_dir).expanduser(), config.prefix_cache_size
    largest = max(blocks.nbytes, states.nbytes)
    if size < 2 * largest:
        raise ValueError(
            f"prefix_cache_size = {format_bytes(size)} is too small for {name}, whose files have up to "
            f"{format_bytes(largest)} each: give more"
        )
    try:
        folder = CacheFolder(root, own, size)
    except OSError as error:
        raise ValueError(
            f"prefix_cache_dir = {str(root)!r} cannot be written: {error.strerror or error}. Name a folder "
            "that this user may write to"
        ) from error
    if folder.problem is not None:
        _logger.warning(
            "%s: prefix_cache_dir = %r is only read, as it cannot be written: %s. Writing is tried again "
            "every minute",
            name,
            str(root),
            folder.problem,
        )
    _logger.info(
        "%s: prefix cache on disk in %s, %s of %s in use; %s for %d tokens",
        name,
        root / folder.fingerprint,
        format_bytes(folder.nbytes),
        format_bytes(size),
        format_bytes(largest),
        runner.block_size,
    )
    if folder.nbytes and not folder.found:
        _logger.info(
            "%s: no file in %s is of this model with these settings, ranks, kernels and versions",
            *(name, root),
        )
    return DiskPrefixCache(folder, manager, blocks, states)


def _why_not(runner: Any, manager: BlockManager) -> str | None:
    """Returns the reason why an engine has no blocks that could be kept; None if it has some."""
    if native_plan(runner.plan) is None:
        return "the model has no native plan"
    if manager.prefix_cache is None:
        return "there is no prefix cache: kv_cache_memory has no room for checkpoints of the model's states"
    return None
