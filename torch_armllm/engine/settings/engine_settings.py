"""The names and types of `EngineConfig`'s settings, for functions that take them by keyword."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from torch_armllm.engine.reports.trace import Trace
from torch_armllm.engine.scheduling.policy import Policy
from torch_armllm.kv_cache.dtype_names import KvCacheDtype, StateDtype
from torch_armllm.lora.dtypes import LoraDtype


class EngineSettings(TypedDict, total=False):
    """Settings by name; see `EngineConfig`, which has the defaults and the meanings."""

    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_step_time: float | None
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    max_memory: int | float | None
    kv_cache_memory: int | float | None
    kv_cache_dtype: KvCacheDtype
    state_dtype: StateDtype
    prefix_cache_dir: str | PathLike[str] | None
    prefix_cache_size: int
    swap_space: int
    limit_mm_per_prompt: Mapping[str, int] | None
    max_audio_seconds: int | float
    allowed_media_path: str | PathLike[str] | None
    allowed_media_domains: Sequence[str]
    promised_memory: int
    scheduling_policy: Policy | None
    seed: int | None
    speculative_config: dict[str, Any] | Literal["auto"] | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_dtype: LoraDtype
    reasoning_config: Mapping[str, str] | None
    logits_processors: Sequence[str | type[Any]]
    disable_log_stats: bool
    trace: str | Trace | None
    tensor_parallel_size: int | Literal["auto"]
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    distributed_executor_backend: Literal["mp", "ray"]
    threads: int | None
    pin_threads: bool | None
