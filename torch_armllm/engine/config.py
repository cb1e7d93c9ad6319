"""Engine settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, get_args

from torch_armllm.engine.media.taken_media import DEFAULT_AUDIO_SECONDS, DEFAULT_LIMITS
from torch_armllm.engine.reports.trace import Trace
from torch_armllm.engine.scheduling.policy import Policy
from torch_armllm.engine.settings.checks import (
    are_drafts,
    check_limits,
    check_policy,
    check_reasoning,
    has_media_limits,
    is_list,
    is_trace,
)
from torch_armllm.kv_cache.dtype_names import KvCacheDtype, StateDtype
from torch_armllm.lora.dtypes import LoraDtype
from torch_armllm.system.dtypes import full_dtype_name
from torch_armllm.system.settings import (
    COUNT,
    FOLDER,
    INTEGER,
    MEMORY,
    OBJECT,
    OUTPUT_FILE,
    RANKS,
    SECONDS,
    SIZE,
    SWITCH,
    TEXTS,
    Kind,
    check_settings,
    choice,
    described,
    setting,
    settings_of,
)

_MAX_BYTES = 1 << 50
_MAX_RANKS = 64
_MAX_THREADS = 1024
"""More threads than this fail to start on common systems, and end the process."""
_CACHE_DTYPES = "auto, int4, int8, bfloat16, float16, float32; int8 takes as little memory as fp8"


@described
@dataclass
class EngineConfig:
    """Settings of an engine; names are those of vLLM if it has the setting.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its bounds.
    """

    max_model_len: int | None = setting(
        None,
        COUNT.within(None, 1 << 26),
        "maximum number of tokens of a prompt and its output together",
        none="the model's limit",
    )
    max_num_seqs: int = setting(64, COUNT.within(None, 1 << 16), "maximum number of sequences per step")
    max_num_batched_tokens: int = setting(
        512, COUNT.within(None, 1 << 20), "maximum number of tokens per step"
    )
    max_step_time: float | None = setting(
        0.2,
        SECONDS,
        "target time in seconds of a step that mixes prefill with decoding",
        "Prompts are cut into smaller chunks to keep it. If decoding alone takes more than half of it, the "
        "target is twice the time of decoding.",
        none="no limit",
    )
    enable_chunked_prefill: bool = setting(True, SWITCH, "prefill long prompts in chunks over several steps")
    enable_prefix_caching: bool = setting(
        True, SWITCH, "reuse the KV cache of prompts that begin with the same tokens"
    )
    max_memory: int | float | None = setting(
        None,
        MEMORY,
        "maximum memory of weights, KV cache and swap space together: bytes, or a fraction of the free "
        "memory; experts beyond it stay on disk",
        "That is for folders of packed weights: experts are read when a step needs them.",
        none="no limit unless the weights exceed the free memory, and then 0.9 of it",
    )
    kv_cache_memory: int | float | None = setting(
        None,
        MEMORY,
        "memory of the KV cache: bytes, or a fraction of the free memory",
        "With `max_memory`: a fraction of that. The cache of a drafter is part of it.",
        none="what `max_num_seqs` sequences of `max_model_len` need, at most a quarter of the free memory, "
        "or an eighth of `max_memory`",
    )
    kv_cache_dtype: KvCacheDtype = setting(
        "auto",
        choice(get_args(KvCacheDtype), _CACHE_DTYPES, "dtype"),
        "data type of the KV cache; int8 and int4 hold more tokens; auto: the model's own",
    )
    state_dtype: StateDtype = setting(
        "float32",
        choice(get_args(StateDtype), kind="dtype"),
        "data type of the states of recurrent layers; bfloat16 takes half the memory",
        "vLLM calls it `mamba_ssm_cache_dtype`. Convolutions keep their inputs in the model's data type.",
    )
    prefix_cache_dir: str | PathLike[str] | None = setting(
        None,
        FOLDER,
        "folder that keeps the KV cache of conversations on disk, so that they go on after a restart",
        "What a request computed is written there, and read when a prompt begins with the same tokens. "
        "Several servers and models may use it. Its files hold what users wrote.",
        none="none",
    )
    prefix_cache_size: int = setting(
        10 * 10**9,
        SIZE.within(0, _MAX_BYTES),
        "maximum number of bytes in that folder",
        "Files that were not used for longest are removed.",
    )
    swap_space: int = setting(
        0,
        SIZE.within(0, _MAX_BYTES),
        "bytes of swap space for preempted sequences",
        "It is ordinary memory. If it is 0 or full, their blocks are recomputed.",
    )
    limit_mm_per_prompt: Mapping[str, int] | None = setting(
        None,
        replace(
            OBJECT,
            give='{"image": number, "audio": number, "video": number}',
            accepts=has_media_limits,
            inspect=check_limits,
        ),
        "maximum number of images, audio clips and videos per prompt",
        "More are refused. If all that are given are 0, a model is served for text only, and its plan has no "
        "input for them.",
        none='{"image": 8, "audio": 8, "video": 2}',
    )
    max_audio_seconds: int | float = setting(
        DEFAULT_AUDIO_SECONDS,
        SECONDS.within(1, 86_400),
        "maximum number of seconds of an audio clip in a prompt",
        "Longer ones are refused by their headers. Memory of decoded clips is bounded beside it.",
    )
    allowed_media_path: str | PathLike[str] | None = setting(
        None,
        FOLDER,
        "folder in which `file://` URLs of images, sound and videos may lie",
        none="they are refused",
    )
    allowed_media_domains: Sequence[str] = setting(
        (),
        replace(TEXTS, give="a list of hosts", shown="HOST"),
        "a host from which images, sound and videos are fetched",
        "URLs begin with `http://` or `https://`.",
    )
    promised_memory: int = setting(
        0,
        SIZE.within(0, _MAX_BYTES),
        "bytes that are reserved for other parts of this process and may not be written yet",
        "They count as used, though the system reports them as free.",
        option=None,
    )
    scheduling_policy: Policy | None = setting(
        None,
        Kind("policy", inspect=check_policy),
        "order of requests",
        none="by priority, then by arrival",
        option=None,
    )
    seed: int | None = setting(
        0, INTEGER, "random seed of requests without their own", none="different in every process"
    )
    speculative_config: dict[str, Any] | Literal["auto"] | None = setting(
        "auto",
        Kind("drafts", "a dict, 'auto', or None for no draft tokens", are_drafts),
        'speculative decoding: auto, none, or JSON such as `{"method": "ngram", …}`',
        "`auto` drafts what followed the last earlier occurrence of a sequence's end, where that is measured "
        "to save time. A dict has the settings of the method `ngram`, `draft_model`, `mtp` or `eagle3`. "
        "Outputs are the same.",
        none="none",
    )
    enable_lora: bool = setting(
        False,
        SWITCH,
        "let requests use LoRA adapters",
        "The model's linear layers get slots for them.",
    )
    max_loras: int = setting(
        1, COUNT.within(1, 1 << 10), "maximum number of adapters that are loaded at a time"
    )
    max_lora_rank: int = setting(16, COUNT.within(1, 1 << 10), "maximum rank of an adapter")
    lora_dtype: LoraDtype = setting(
        "auto",
        choice(get_args(LoraDtype)),
        "numbers of adapters in memory: int8, or the model's data type; auto: int8, unless the model's is "
        "float32",
        "int8 has a scale for each 64.",
    )
    reasoning_config: Mapping[str, str] | None = setting(
        None,
        replace(OBJECT, inspect=check_reasoning, accepts=lambda value: True),
        'how the model marks its reasoning, for thinking budgets: `{"reasoning_start_str": "<think>", '
        '"reasoning_end_str": "</think>"}`',
        "Or `reasoning_parser` with the name of a family. The end is what a budget forces, and may begin "
        "with a phrase that leads over to the answer, if the model's own end is known.",
        none="detected from the chat template and the tokens",
    )
    logits_processors: Sequence[str | type[Any]] = setting(
        (),
        replace(TEXTS, give="a list of classes, or of 'module:Class'", accepts=is_list, shown="MODULE:CLASS"),
        "a subclass of torch_armllm.AdapterLogitsProcessor or LogitsProcessor that may change logits",
    )
    disable_log_stats: bool = setting(
        False, SWITCH, "turns off the log line of throughput while requests run", option=None
    )
    trace: str | Trace | None = setting(
        None,
        replace(OUTPUT_FILE, accepts=is_trace),
        "write the time of every step to this file, in Chrome's trace format",
        "Or a track of a file that several engines write to.",
        none="no file",
    )
    tensor_parallel_size: int | Literal["auto"] = setting(
        "auto",
        RANKS.within(1, _MAX_RANKS, "auto"),
        "number of processes that share out the model, or auto: one for each NUMA node if that is faster",
        "They compute each step together, each with a part of the weights; the results have the same bits. "
        "`auto` counts the NUMA nodes that the process may use, where the model and the settings allow it.",
    )
    pipeline_parallel_size: int = setting(
        1,
        COUNT.within(1, _MAX_RANKS),
        "number of processes that compute the layers of a model one after another, for machines whose "
        "connection is slow",
        "Each computes another step; the results have the same bits. With `tensor_parallel_size`, each stage "
        "has so many ranks.",
    )
    data_parallel_size: int = setting(
        1,
        COUNT.within(1, _MAX_RANKS),
        "processes with an engine each, between which requests are shared out by their prefixes",
        "Each has the whole model, or its ranks, and the other settings are those of each.",
    )
    enable_expert_parallel: bool = setting(
        False,
        SWITCH,
        "let each tensor parallel rank compute whole experts, not some columns of all",
        "The results have the same bits. A single rank has all experts.",
    )
    distributed_executor_backend: Literal["mp", "ray"] = setting(
        "mp",
        choice(("mp", "ray")),
        "what starts the processes of `tensor_parallel_size` and `pipeline_parallel_size`: mp, on this "
        "machine; ray, as actors of a Ray cluster",
        "Ranks that `torchrun` has started stay as they are.",
    )
    threads: int | None = setting(
        None,
        COUNT.within(None, _MAX_THREADS),
        "number of compute threads of a process",
        none="one for each physical core that it may use",
        option=None,  # every command has it
    )
    pin_threads: bool | None = setting(
        None, SWITCH, "pin each thread to a core", none="if the threads fill all cores"
    )

    def __post_init__(self) -> None:
        for field, declared in settings_of(self):
            if declared.kind.name == "dtype" and isinstance(value := getattr(self, field.name), str):
                setattr(self, field.name, full_dtype_name(value))
        check_settings(self)
        folder = self.prefix_cache_dir
        if folder and not self.enable_prefix_caching:
            raise ValueError(f"prefix_cache_dir = {str(folder)!r} needs enable_prefix_caching: leave one out")
        if folder and self.enable_lora:
            raise ValueError(
                f"prefix_cache_dir = {str(folder)!r} does not know adapters: leave it or enable_lora out"
            )

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
    def media_limits(self) -> dict[str, int]:
        """Most images, audio clips and videos of a prompt, by `MODALITIES`."""
        given = self.limit_mm_per_prompt or {}
        others = dict.fromkeys(DEFAULT_LIMITS, 0) if given and not any(given.values()) else DEFAULT_LIMITS
        return {**others, **given}
