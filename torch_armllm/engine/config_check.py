"""Checks of the types and the bounds of engine settings."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch_armllm.engine.text.reasoning_tags import parser_of
from torch_armllm.kv_cache.dtypes import KV_CACHE_DTYPES, STATE_DTYPES
from torch_armllm.lora.dtypes import LORA_DTYPES

MAX_MODEL_LEN = 1 << 26
MAX_NUM_SEQS = 1 << 16
MAX_NUM_BATCHED_TOKENS = 1 << 20
MAX_RANKS = 64
MAX_THREADS = 1024
"""More threads than this fail to start on common systems, and end the process."""
MAX_BYTES = 1 << 50
EXECUTOR_BACKENDS = ("mp", "ray")
MAX_LORAS = 1 << 10
MAX_LORA_RANK = 1 << 10

_INTEGERS: dict[str, tuple[int | None, int | None]] = {
    "max_model_len": (None, MAX_MODEL_LEN),
    "max_num_seqs": (None, MAX_NUM_SEQS),
    "max_num_batched_tokens": (None, MAX_NUM_BATCHED_TOKENS),
    "prefix_cache_size": (0, MAX_BYTES),
    "swap_space": (0, MAX_BYTES),
    "promised_memory": (0, MAX_BYTES),
    "max_loras": (1, MAX_LORAS),
    "max_lora_rank": (1, MAX_LORA_RANK),
    "seed": (None, None),
    "tensor_parallel_size": (1, MAX_RANKS),
    "pipeline_parallel_size": (1, MAX_RANKS),
    "data_parallel_size": (1, MAX_RANKS),
    "threads": (None, MAX_THREADS),
}
"""Least and most; where the least is None, it depends on other settings, and is checked with them."""
_NUMBERS = ("max_step_time", "max_memory", "kv_cache_memory")
_REASONING = ("reasoning_start_str", "reasoning_end_str", "reasoning_parser")
_SWITCHES = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_lora",
    "enable_expert_parallel",
    "disable_log_stats",
    "pin_threads",
)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Checks the settings that are not None.

    Raises:
        TypeError: a setting is of another type.
        ValueError: a setting is out of its bounds.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, (least, most) in _INTEGERS.items():
        if name in given and not (name == "tensor_parallel_size" and given[name] == "auto"):
            _check_integer(name, given[name], least, most)
    for name in _NUMBERS:
        if name in given:
            _check_number(name, given[name])
    for name in _SWITCHES:
        if name in given and not isinstance(given[name], bool):
            raise TypeError(f"{name} = {given[name]!r}: give True or False")
    cache_dtype = settings["kv_cache_dtype"]
    if not (isinstance(cache_dtype, str) and cache_dtype in ("auto", *KV_CACHE_DTYPES)):
        raise ValueError(
            f"kv_cache_dtype = {cache_dtype!r}: give auto, {', '.join(KV_CACHE_DTYPES)}; int8 takes as "
            "little memory as fp8"
        )
    lora_dtype = settings["lora_dtype"]
    if lora_dtype not in LORA_DTYPES:
        raise ValueError(f"lora_dtype = {lora_dtype!r}: give {' or '.join(LORA_DTYPES)}")
    state_dtype = settings["state_dtype"]
    if not (isinstance(state_dtype, str) and state_dtype in STATE_DTYPES):
        raise ValueError(f"state_dtype = {state_dtype!r}: give {' or '.join(STATE_DTYPES)}")
    backend = settings["distributed_executor_backend"]
    if not (isinstance(backend, str) and backend in EXECUTOR_BACKENDS):
        raise ValueError(f"distributed_executor_backend = {backend!r}: give {' or '.join(EXECUTOR_BACKENDS)}")
    _check_objects(given)


def _check_integer(name: str, value: Any, least: int | None, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} = {value!r}: give an integer")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} = {value}: give at most {most}")
    if least is not None and int(value) < least:
        raise ValueError(f"{name} = {value}: give at least {least}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} = {value!r}: give a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} = {value}: give a finite number")


def _check_reasoning(settings: Any) -> None:
    if not isinstance(settings, Mapping) or set(settings) - set(_REASONING):
        raise TypeError(f"reasoning_config = {settings!r}: give a dict of {', '.join(_REASONING)}")
    for name, text in settings.items():
        if not isinstance(text, str) or not text:
            raise TypeError(f"reasoning_config: {name} is {text!r}; give a text")
    try:
        parser_of(settings.get("reasoning_parser"))
    except ValueError as error:
        raise ValueError(f"reasoning_config: reasoning_parser {error}") from error


def _check_objects(given: Mapping[str, Any]) -> None:
    drafts = given.get("speculative_config", "auto")
    if drafts != "auto" and not isinstance(drafts, Mapping):
        raise TypeError(f"speculative_config = {drafts!r}: give a dict, 'auto', or None for no draft tokens")
    if "scheduling_policy" in given and not hasattr(given["scheduling_policy"], "sort_key"):
        raise TypeError(f"scheduling_policy = {given['scheduling_policy']!r} has no method sort_key")
    limits = given.get("limit_mm_per_prompt", {})
    if not isinstance(limits, Mapping) or set(limits) - {"image"}:
        raise TypeError(f'limit_mm_per_prompt = {limits!r}: give {{"image": number}}')
    for value in limits.values():
        _check_integer("limit_mm_per_prompt", value, 0, None)
    media = given.get("allowed_media_path", "")
    if not isinstance(media, (str, os.PathLike)):
        raise TypeError(f"allowed_media_path = {media!r}: give the path of a folder")
    domains = given.get("allowed_media_domains", ())
    is_list = isinstance(domains, Sequence) and not isinstance(domains, str)
    if not is_list or not all(isinstance(domain, str) for domain in domains):
        raise TypeError(f"allowed_media_domains = {domains!r}: give a list of hosts")
    _check_reasoning(given.get("reasoning_config", {}))
    processors = given.get("logits_processors", ())
    if isinstance(processors, str) or not isinstance(processors, Sequence):
        raise TypeError(f"logits_processors = {processors!r}: give a list of classes, or of 'module:Class'")
    folder = given.get("prefix_cache_dir", "")
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"prefix_cache_dir = {folder!r}: give the path of a folder")
    if folder and not given.get("enable_prefix_caching", True):
        raise ValueError(f"prefix_cache_dir = {str(folder)!r} needs enable_prefix_caching: leave one out")
    if folder and given.get("enable_lora"):
        raise ValueError(
            f"prefix_cache_dir = {str(folder)!r} does not know adapters: leave it or enable_lora out"
        )
    trace = given.get("trace", "")
    if not isinstance(trace, (str, os.PathLike)) and not hasattr(trace, "begin"):
        raise TypeError(f"trace = {trace!r}: give the path of a file")
