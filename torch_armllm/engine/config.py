"""How an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_armllm.engine.scheduling.policy import Policy
from torch_armllm.engine.trace import Trace
from torch_armllm.kv_cache.dtypes import KvCacheDtype


@dataclass
class EngineConfig:
    """Settings of an engine; names are vLLM's where it has them.

    Attributes:
        max_model_len: most tokens of a prompt and its sequence; None: what the model was made for.
        max_num_seqs: most sequences that take part in a step.
        max_num_batched_tokens: most tokens of a step.
        max_step_time: seconds that a step may take which reads a prompt while sequences are written: smaller
            pieces of the prompt where it would take longer (or twice as long as the sequences alone); None:
            no limit.
        enable_chunked_prefill: whether prompts may be read in pieces, over several steps.
        enable_prefix_caching: whether blocks that are let go can be found again by what they hold.
        kv_cache_memory: bytes, or a part of the memory that is free (0 … 1); None: a quarter of it at most,
            and no more than `max_num_seqs` texts of `max_model_len` need.
        kv_cache_dtype: ``auto`` is the model's own.
        swap_space: bytes of ordinary memory for blocks of preempted sequences; 0, or where they do not fit:
            they are computed again.
        promised_memory: bytes that others of this process were given and may not have written to yet; they
            count as taken, though the system calls them free.
        scheduling_policy: who is served first; None: by priority, equal ones in the order in which they came.
        seed: from which the seeds of requests without one are drawn; None: another in every process.
        speculative_config: how tokens are guessed: ``{"method": "ngram" | "draft_model", …}``.
        disable_log_stats: no line of rates while requests run.
        trace: a file for the timing of every step, in Chrome's trace format; or a track of one that several
            engines write to.
        threads: that compute; None: one for each physical core that the process may use.
        pin_threads: whether they stay on their cores; None: where they fill all of those.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_time: float | None = 0.2
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    kv_cache_memory: int | float | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    swap_space: int = 0
    promised_memory: int = 0
    scheduling_policy: Policy | None = None
    seed: int | None = 0
    speculative_config: dict[str, Any] | None = None
    disable_log_stats: bool = False
    trace: str | Trace | None = None
    threads: int | None = None
    pin_threads: bool | None = None
