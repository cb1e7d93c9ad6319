"""Engine settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal

from torch_armllm.engine.config_check import check_settings
from torch_armllm.engine.scheduling.policy import Policy
from torch_armllm.engine.trace import Trace
from torch_armllm.kv_cache.dtypes import KvCacheDtype, StateDtype
from torch_armllm.lora.dtypes import LoraDtype
from torch_armllm.system.dtypes import full_dtype_name


@dataclass
class EngineConfig:
    """Settings of an engine; names are those of vLLM if it has the setting.

    Attributes:
        max_model_len: maximum number of tokens of a prompt and its output together; None: the model's limit.
        max_num_seqs: maximum number of sequences in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_step_time: target time in seconds of a step that prefills while other sequences decode: prompts
            are cut into smaller chunks to keep it. If decoding alone takes more than half of it, the target
            is twice the time of decoding. None: no limit.
        enable_chunked_prefill: allows prompts to be computed in chunks over several steps.
        enable_prefix_caching: lets a prompt reuse blocks of other sequences that begin with the same tokens.
        max_memory: bytes for weights, KV cache and swap space together, or a fraction of the free memory
            (0.0 … 1.0). Experts of a folder of packed weights that do not fit stay on disk, and are read when
            a step needs them. None: only where the weights are larger than the free memory, at 0.9 of it.
        kv_cache_memory: bytes, or a fraction of the free memory (0.0 … 1.0); None: at most a quarter of it,
            and no more than `max_num_seqs` sequences of `max_model_len` need. With `max_memory`: a fraction
            of that; None: at most an eighth of it. The cache of a drafter is part of it.
        kv_cache_dtype: ``auto`` is the model's dtype; ``int8`` and ``int4`` hold more tokens.
        state_dtype: dtype of the states of recurrent layers, ``float32`` or ``bfloat16``; vLLM calls it
            ``mamba_ssm_cache_dtype``. Convolutions keep their inputs in the model's dtype.
        prefix_cache_dir: folder in which the prefix cache outlives the process: what a request computed is
            written there, and read when a prompt begins with the same tokens. Several servers and models may
            use it. Its files hold what users wrote. None: none.
        prefix_cache_size: most bytes of all files in that folder; those that were not used for longest are
            removed.
        swap_space: bytes of ordinary memory for the blocks of preempted sequences; if it is 0 or full, they
            are recomputed.
        limit_mm_per_prompt: most pictures of a prompt, ``{"image": 8}``; more are refused. With 0 a model
            is served for text only, and its plan has no input for them.
        allowed_media_path: folder in which ``file://`` URLs of pictures may lie; None: they are refused.
        allowed_media_domains: hosts from which ``http://`` and ``https://`` URLs of pictures are fetched.
        promised_memory: bytes that are reserved for other parts of this process and may not be written yet;
            they count as used, though the system reports them as free.
        scheduling_policy: order of requests; None: by priority, then by arrival.
        seed: seeds the requests that have no seed of their own; None: different in every process.
        speculative_config: ``auto`` drafts what followed the last earlier occurrence of a sequence's end,
            where that is measured to save time; ``{"method": "ngram" | "draft_model" | "mtp" | "eagle3", …}``
            are settings of speculative decoding; None: none. Outputs are the same.
        enable_lora: lets requests use LoRA adapters; the model's linear layers get slots for them.
        max_loras: most adapters that are loaded at a time.
        max_lora_rank: highest rank of an adapter.
        lora_dtype: numbers of adapters in memory: ``int8`` with a scale for each 64, ``model`` for the
            model's dtype; ``auto``: int8, unless the model's dtype is float32.
        reasoning_config: how the model marks its reasoning, for thinking budgets:
            ``{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}``, or ``reasoning_parser``
            with the name of a family. The end is what a budget forces, and may begin with a phrase that
            leads over to the answer, if the model's own end is known. None: found by the chat template and
            the tokens.
        logits_processors: subclasses of `AdapterLogitsProcessor` or `LogitsProcessor`, or their names as
            ``module:Class``.
        disable_log_stats: turns off the log line of throughput while requests run.
        trace: file for the timing of every step, in Chrome's trace format; or a track of a file that several
            engines write to.
        tensor_parallel_size: number of processes that compute each step together, each with a part of the
            weights; the results have the same bits. ``auto``: one for each NUMA node that the process may
            use, where that is estimated to be faster, and the model and the settings allow it.
        pipeline_parallel_size: number of processes that compute the layers of a model one after another, each
            another step, as machines do whose connection is slow; the results have the same bits. With
            tensor_parallel_size, each stage has so many ranks.
        data_parallel_size: number of processes with an engine each, between which requests are shared out;
            each has the whole model, or its ranks, and the other settings are those of each.
        enable_expert_parallel: each tensor parallel rank computes whole experts, and not some columns of
            all; the results have the same bits. A single rank has all experts.
        distributed_executor_backend: ``mp`` starts the ranks and stages as processes of this machine, unless
            ``torchrun`` has started them; ``ray`` starts them as actors of a Ray cluster.
        threads: number of compute threads of a process; None: one for each physical core that it may use.
        pin_threads: pins the threads to their cores; None: pins them if they fill all of those cores.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its bounds.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_time: float | None = 0.2
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    max_memory: int | float | None = None
    kv_cache_memory: int | float | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    state_dtype: StateDtype = "float32"
    prefix_cache_dir: str | PathLike[str] | None = None
    prefix_cache_size: int = 10 * 10**9
    swap_space: int = 0
    limit_mm_per_prompt: Mapping[str, int] | None = None
    allowed_media_path: str | PathLike[str] | None = None
    allowed_media_domains: Sequence[str] = ()
    promised_memory: int = 0
    scheduling_policy: Policy | None = None
    seed: int | None = 0
    speculative_config: dict[str, Any] | Literal["auto"] | None = "auto"
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_dtype: LoraDtype = "auto"
    reasoning_config: Mapping[str, str] | None = None
    logits_processors: Sequence[str | type[Any]] = ()
    disable_log_stats: bool = False
    trace: str | Trace | None = None
    tensor_parallel_size: int | Literal["auto"] = "auto"
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    threads: int | None = None
    pin_threads: bool | None = None

    def __post_init__(self) -> None:
        for name in ("kv_cache_dtype", "state_dtype"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, full_dtype_name(value))
        check_settings({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks of each stage; 1 for ``auto``, which a loader decides on."""
        return 1 if self.tensor_parallel_size == "auto" else self.tensor_parallel_size

    @property
    def ranks(self) -> int:
        """Number of processes that compute together."""
        return self.tensor_ranks * self.pipeline_parallel_size

    @property
    def has_stages_only(self) -> bool:
        """True if each stage of the pipeline is a single process."""
        return self.pipeline_parallel_size > 1 and self.tensor_ranks == 1

    @property
    def most_pictures(self) -> int:
        """Most pictures of a prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", 8)
