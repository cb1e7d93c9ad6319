"""Settings and calls of vLLM that this package lacks: each is refused with the reason and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

NO_CODE = "code of a checkpoint is never run: leave it out, and load a model whose class is in transformers"
REASONS = {
    "disable_custom_all_reduce": "ranks exchange columns in one way only: leave it out",
    **dict.fromkeys(
        ("enforce_eager", "compilation_config", "max_seq_len_to_capture"),
        "there are no CUDA graphs: a step always runs as one native plan; leave it out",
    ),
    "gpu_memory_utilization": "there is no GPU: give kv_cache_memory or max_memory, as bytes or a part of "
    "the free memory, or leave it out",
    "mamba_ssm_cache_dtype": "give state_dtype",
    "cpu_offload_gb": "weights are in main memory already; max_memory keeps experts on disk",
    "block_size": "the size of a block follows from the model: leave it out",
    "num_gpu_blocks_override": "give kv_cache_memory in bytes",
    "device": "the CPU computes: leave it out",
    "load_format": "the format is recognized by a checkpoint's files: leave it out",
    "tokenizer_mode": "the tokenizer is transformers' own: leave it out",
    "tokenizer_revision": "give tokenizer as a folder, or revision for model and tokenizer together",
    "download_dir": "set HF_HOME for all downloads",
    "async_scheduling": "steps are scheduled in microseconds between two steps: leave it out",
    "max_logprobs": "SamplingParams(logprobs=-1) gives all: leave it out",
    "disable_sliding_window": "windows are those of the model: leave it out",
    "enable_sleep_mode": "sleep works without it: leave it out",
}
"""Reasons for which settings do not exist, and what to give instead, by name."""
CALLS = {
    "collective_rpc": "there are no workers that run other code; model is the transformers model",
    "apply_model": "call the function with model, the transformers model",
    **dict.fromkeys(("start_profile", "stop_profile"), "give trace='trace.json', which times every step"),
    **dict.fromkeys(
        ("enqueue", "wait_for_completion"), "AsyncLLM.generate adds requests while others are computed"
    ),
    **dict.fromkeys(
        ("init_weight_transfer_engine", "update_weights"),
        "weights are quantized and packed as they are loaded: make another",
    ),
}
"""Reasons for which methods do not exist, and what to call instead, by name."""


def missing_attribute(kind: str, name: str) -> AttributeError:
    """Returns the error of an attribute that a class does not have, with the reason if vLLM's has it."""
    reason = f": {CALLS[name]}" if name in CALLS else ""
    return AttributeError(f"{kind!r} object has no attribute {name!r}{reason}", name=name)


def check_names(settings: Mapping[str, object], known: Iterable[str]) -> None:
    """Checks that all settings exist.

    Args:
        settings: by name.
        known: names of those that exist.

    Raises:
        ValueError: a setting is one of vLLM's alone, or of nobody's.
    """
    names = list(known)
    for name, value in settings.items():
        if name in names:
            continue
        if name in REASONS:
            raise ValueError(f"{name}={value!r} is not a setting here: {REASONS[name]}")
        close = difflib.get_close_matches(name, names, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"unknown setting {name!r}{meant}; an engine has {', '.join(names)}; how its model is quantized "
            "is said by quantization=Recipe(…)"
        )
