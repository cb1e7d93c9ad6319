"""Engine options shared by all commands that run an engine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torch_armllm.system.files import parse_bytes

_SETTINGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_step_time",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "max_memory",
    "kv_cache_memory",
    "kv_cache_dtype",
    "state_dtype",
    "prefix_cache_dir",
    "prefix_cache_size",
    "swap_space",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "limit_mm_per_prompt",
    "allowed_media_path",
    "allowed_media_domains",
    "seed",
    "threads",
    "pin_threads",
    "speculative_config",
    "trace",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options; their names are those of `EngineConfig`'s settings."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--dtype", default="auto", help="dtype of the weights: auto, bfloat16, float16, float32 (auto)"
    )
    group.add_argument(
        "--quantization",
        default="auto",
        help="int4, another scheme, none, or auto: smollm2 as its 4-bit file has it, others in int4 (auto)",
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor of a saved folder with its checksum before it is loaded",
    )
    group.add_argument("--max-model-len", type=int, help="most tokens of a sequence, prompt included")
    group.add_argument("--max-num-seqs", type=int, help="most sequences per step")
    group.add_argument("--max-num-batched-tokens", type=int, help="most tokens per step")
    group.add_argument(
        "--max-step-time", type=float, help="seconds that a step may take when it mixes prefill with decoding"
    )
    switch = argparse.BooleanOptionalAction
    group.add_argument(
        "--enable-chunked-prefill", action=switch, help="prefill long prompts in chunks over several steps"
    )
    group.add_argument(
        "--enable-prefix-caching", action=switch, help="reuse the KV cache of common prompt beginnings"
    )
    group.add_argument(
        "--max-memory",
        type=_memory,
        help="bytes (20GB) of weights and KV cache, or a fraction of the free memory: experts beyond it stay "
        "on disk",
    )
    group.add_argument(
        "--kv-cache-memory", type=_memory, help="bytes (2GiB), or a fraction of the free memory (0.5)"
    )
    group.add_argument("--kv-cache-dtype", help="auto, bfloat16, float16, float32, int8 or int4")
    group.add_argument(
        "--state-dtype", help="states of recurrent layers: float32 or bfloat16, which takes half the memory"
    )
    group.add_argument(
        "--prefix-cache-dir",
        metavar="DIR",
        help="folder that keeps the KV cache of conversations on disk, so that they go on after a restart",
    )
    group.add_argument(
        "--prefix-cache-size", type=_size, metavar="SIZE", help="most bytes in that folder (10GB)"
    )
    group.add_argument("--swap-space", type=_memory, help="bytes of swap space for preempted sequences")
    group.add_argument("--enable-lora", action=switch, help="let requests use LoRA adapters")
    group.add_argument("--max-loras", type=int, help="most adapters that are loaded at a time (1)")
    group.add_argument("--max-lora-rank", type=int, help="highest rank of an adapter (16)")
    group.add_argument(
        "--limit-mm-per-prompt",
        type=json_object,
        metavar="JSON",
        help='most pictures of a prompt ({"image": 8})',
    )
    group.add_argument(
        "--allowed-media-path", metavar="DIR", help="folder in which file URLs of pictures may lie"
    )
    group.add_argument(
        "--allowed-media-domains",
        action="append",
        metavar="HOST",
        help="a host from which pictures are fetched; may be given several times",
    )
    group.add_argument("--seed", type=int, help="seed of requests without their own")
    group.add_argument(
        "--speculative-config",
        type=_drafts,
        help='speculative decoding: auto, none, or JSON such as {"method": "ngram", …} (auto)',
    )
    group.add_argument("--pin-threads", action=switch, help="pin each thread to a core")
    group.add_argument("--trace", help="write every step's timing to this file, in Chrome's trace format")


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `LLM`; settings that were not given are left out."""
    settings = {name: getattr(options, name) for name in _SETTINGS if getattr(options, name) is not None}
    if settings.get("speculative_config") == "none":
        settings["speculative_config"] = None
    return {
        "dtype": options.dtype,
        "quantization": None if options.quantization == "none" else options.quantization,
        **({"verify": True} if options.verify else {}),
        **settings,
    }


def _memory(text: str) -> int | float:
    if (size := parse_bytes(text)) is not None:
        return size
    try:
        amount = float(text.lower().removesuffix("b"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 500MB or 2GiB") from None
    return amount if amount < 1 else int(amount)


def _size(text: str) -> int:
    amount = _memory(text)
    if not isinstance(amount, int):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 500MB or 2GiB")
    return amount


def _drafts(text: str) -> dict[str, Any] | str:
    return text if text in ("auto", "none") else json_object(text)


def json_object(text: str) -> dict[str, Any]:
    """Returns the object of an option's JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"name": "value"}}')
    return value
