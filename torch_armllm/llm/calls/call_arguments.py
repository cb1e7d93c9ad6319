"""Arguments of vLLM's calls that these calls lack: each is refused with the reason and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

_MEDIA = "give it in the prompt: {'prompt': …, 'multi_modal_data': …, 'mm_processor_kwargs': …}"
_TOKENS = "give the prompt as token ids, or as {'prompt_token_ids': …}"
_FORMAT = "give SamplingParams(structured_outputs=StructuredOutputsParams(…))"
REASONS = {
    "concurrency_limit": "all beams are computed together, as many at a time as max_num_seqs allows",
    "data_parallel_rank": "the router of the replicas decides where a request goes",
    "guided_options_request": _FORMAT,
    "lora_request": "adapters are for models that generate",
    "mm_processor_kwargs": _MEDIA,
    "prompt_adapter_request": "there are no prompt adapters",
    "prompt_text": "give the prompt as {'prompt': …, 'prompt_token_ids': …}",
    "prompt_token_ids": _TOKENS,
    "reasoning_ended": "it is read off the prompt",
    "tokenization_kwargs": "give PoolingParams(truncate_prompt_tokens=…), or token ids",
    "trace_headers": "no traces are exported",
    "truncate_prompt_tokens": "give PoolingParams(truncate_prompt_tokens=…) or tokenization_kwargs",
}
"""Reasons for which arguments do not exist, and what to give instead, by name."""


class ForeignArguments(TypedDict, total=False):
    """Arguments of vLLM's calls; None is the same as leaving one out."""

    concurrency_limit: Any
    data_parallel_rank: Any
    guided_options_request: Any
    mm_processor_kwargs: Any
    prompt_adapter_request: Any
    prompt_text: Any
    prompt_token_ids: Any
    reasoning_ended: Any
    trace_headers: Any
    truncate_prompt_tokens: Any


class ForeignPoolingArguments(ForeignArguments, total=False):
    """Those of calls that pool, which have fewer of their own."""

    lora_request: Any
    tokenization_kwargs: Any


def check_arguments(call: str, given: Mapping[str, Any], known: Iterable[str] = ()) -> None:
    """Checks that a call has no further arguments.

    Args:
        call: its name.
        given: the further arguments by their names.
        known: names of those that it has.

    Raises:
        ValueError: an argument is one of vLLM's alone.
        TypeError: it is nobody's.
    """
    for name, value in given.items():
        if name not in REASONS:
            close = difflib.get_close_matches(name, [*known, *REASONS], n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{meant}")
        if value is not None:
            raise ValueError(f"{name} is no argument of {call} here: {REASONS[name]}; leave it out")
