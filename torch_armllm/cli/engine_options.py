"""Engine options shared by all commands that run an engine."""

from __future__ import annotations

import argparse
from typing import Any

from torch_armllm.cli import option_types as types
from torch_armllm.cli.parser import Parser
from torch_armllm.lora.dtypes import LORA_DTYPES

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
    "lora_dtype",
    "limit_mm_per_prompt",
    "allowed_media_path",
    "allowed_media_domains",
    "seed",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "distributed_executor_backend",
    "threads",
    "pin_threads",
    "speculative_config",
    "reasoning_config",
    "logits_processors",
    "trace",
)
_LOADING = ("revision", "hf_overrides")
"""Arguments of `LLM` that are no settings of its engine."""


def add_engine_options(parser: Parser, max_num_seqs: int = 64) -> None:
    """Adds the options; their names are those of `EngineConfig`'s settings.

    Options that are not given are left to `EngineConfig`, whose defaults the helps name.

    Args:
        parser: of the command.
        max_num_seqs: the command's default of this setting.
    """
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--dtype",
        type=types.dtype,
        choices=("auto", *types.FLOATS),
        default="auto",
        help="data type of the weights; bf16, fp16 and fp32 are accepted, too; auto: the checkpoint's own",
    )
    group.add_argument(
        "--quantization",
        default="auto",
        help="int4, another scheme, or none to keep the weights as they are; auto: int4, but smollm2 keeps "
        "the integers of its 4-bit file",
    )
    group.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the hub (default: the default branch)",
    )
    group.add_argument(
        "--hf-overrides",
        type=types.json_object,
        metavar="JSON",
        help='fields to replace in config.json, such as {"max_position_embeddings": 65536} (default: none)',
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor of a saved folder with its checksum before it is loaded",
    )
    group.add_argument(
        "--max-model-len",
        type=types.positive,
        metavar="N",
        help="maximum number of tokens of a prompt and its output together (default: the model's limit)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=types.positive,
        default=None if max_num_seqs == 64 else max_num_seqs,
        metavar="N",
        help=f"maximum number of sequences per step (default: {max_num_seqs})",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=types.positive,
        metavar="N",
        help="maximum number of tokens per step (default: 512)",
    )
    group.add_argument(
        "--max-step-time",
        type=types.seconds,
        metavar="SECONDS",
        help="target time of a step that mixes prefill with decoding (default: 0.2)",
    )
    switch = argparse.BooleanOptionalAction
    group.add_argument(
        "--enable-chunked-prefill",
        action=switch,
        help="prefill long prompts in chunks over several steps (default: on)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=switch,
        help="reuse the KV cache of prompts that begin with the same tokens (default: on)",
    )
    group.add_argument(
        "--max-memory",
        type=types.memory,
        metavar="SIZE",
        help="maximum memory of weights and KV cache: bytes (20GB), or a fraction of the free memory (0.8); "
        "experts beyond it stay on disk (default: no limit unless the weights exceed the free memory)",
    )
    group.add_argument(
        "--kv-cache-memory",
        type=types.memory,
        metavar="SIZE",
        help="memory of the KV cache: bytes (2GiB), or a fraction of the free memory (0.5) (default: what "
        "--max-num-seqs sequences of --max-model-len need, at most a quarter of the free memory)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        type=types.dtype,
        choices=("auto", *types.FLOATS, "int8", "int4"),
        help="data type of the KV cache; int8 and int4 hold more tokens; auto: the model's own "
        "(default: auto)",
    )
    group.add_argument(
        "--state-dtype",
        type=types.dtype,
        choices=("float32", "bfloat16"),
        help="data type of the states of recurrent layers; bfloat16 takes half the memory (default: float32)",
    )
    group.add_argument(
        "--prefix-cache-dir",
        metavar="DIR",
        help="folder that keeps the KV cache of conversations on disk, so that they go on after a restart "
        "(default: none)",
    )
    group.add_argument(
        "--prefix-cache-size",
        type=types.size,
        metavar="SIZE",
        help="maximum number of bytes in that folder (default: 10GB)",
    )
    group.add_argument(
        "--swap-space",
        type=types.memory,
        metavar="SIZE",
        help="bytes of swap space for preempted sequences (default: 0)",
    )
    group.add_argument("--enable-lora", action=switch, help="let requests use LoRA adapters (default: off)")
    group.add_argument(
        "--max-loras",
        type=types.positive,
        metavar="N",
        help="maximum number of adapters that are loaded at a time (default: 1)",
    )
    group.add_argument(
        "--max-lora-rank", type=types.positive, metavar="N", help="maximum rank of an adapter (default: 16)"
    )
    group.add_argument(
        "--lora-dtype",
        choices=LORA_DTYPES,
        help="numbers of adapters in memory: int8, or the model's data type; auto: int8, unless the model's "
        "is float32 (default: auto)",
    )
    group.add_argument(
        "--limit-mm-per-prompt",
        type=types.json_object,
        metavar="JSON",
        help='maximum number of pictures per prompt (default: {"image": 8})',
    )
    group.add_argument(
        "--allowed-media-path",
        metavar="DIR",
        help="folder in which file:// URLs of pictures may lie (default: they are refused)",
    )
    group.add_argument(
        "--allowed-media-domains",
        action="append",
        metavar="HOST",
        help="a host from which pictures are fetched; repeatable (default: none)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="random seed of requests without their own (default: 0)"
    )
    group.add_argument(
        "--speculative-config",
        type=_drafts,
        metavar="JSON",
        help='speculative decoding: auto, none, or JSON such as {"method": "ngram", …} (default: auto)',
    )
    group.add_argument(
        "--reasoning-config",
        type=types.json_object,
        metavar="JSON",
        help='how the model marks its reasoning, for thinking budgets: {"reasoning_start_str": "<think>", '
        '"reasoning_end_str": "</think>"} (default: detected from the chat template and the tokens)',
    )
    group.add_argument(
        "--logits-processors",
        action="append",
        metavar="MODULE:CLASS",
        help="a subclass of torch_armllm.AdapterLogitsProcessor or LogitsProcessor that may change logits; "
        "repeatable (default: none)",
    )
    group.add_argument(
        "--data-parallel-size",
        type=types.positive,
        metavar="N",
        help="processes with an engine each, between which requests are shared out by their prefixes "
        "(default: 1)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=types.ranks,
        metavar="N",
        help="number of processes that share out the model, or auto: one for each NUMA node if that is "
        "faster (default: auto)",
    )
    group.add_argument(
        "--pipeline-parallel-size",
        type=types.positive,
        metavar="N",
        help="number of processes that compute the layers of a model one after another, for machines whose "
        "connection is slow (default: 1)",
    )
    group.add_argument(
        "--enable-expert-parallel",
        action=switch,
        help="let each tensor parallel rank compute whole experts, not some columns of all (default: off)",
    )
    group.add_argument(
        "--distributed-executor-backend",
        choices=("mp", "ray"),
        help="what starts the processes of --tensor-parallel-size and --pipeline-parallel-size: mp, on this "
        "machine; ray, as actors of a Ray cluster (default: mp)",
    )
    group.add_argument(
        "--pin-threads",
        action=switch,
        help="pin each thread to a core (default: if the threads fill all cores)",
    )
    group.add_argument(
        "--trace",
        type=types.output_file,
        metavar="FILE",
        help="write the time of every step to this file, in Chrome's trace format (default: no file)",
    )


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `LLM`; settings that were not given are left out."""
    names = (*_SETTINGS, *_LOADING)
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if settings.get("speculative_config") == "none":
        settings["speculative_config"] = None
    return {
        "dtype": options.dtype,
        "quantization": None if options.quantization == "none" else options.quantization,
        **({"verify": True} if options.verify else {}),
        **settings,
    }


def _drafts(text: str) -> dict[str, Any] | str:
    return text if text in ("auto", "none") else types.json_object(text)
