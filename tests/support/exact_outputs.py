"""Outputs of engines compared bit by bit: alone, batched, in chunks, preempted and forked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.support.engines import drain, submit
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.model_survey.tiny_models import tiny_ids

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
LONGER = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, ignore_eos=True)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_seqs": 2},
    {"max_num_batched_tokens": 16},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 512},
)
"""Settings of engines that compute the same prompts in other batches and chunks."""
_CROWDED = {"max_num_seqs": 3, "max_model_len": 101}
"""Settings with which the prompts of `check_preempted` need more than five blocks."""

MakeEngine = Callable[..., LLMEngine]
"""Builds an engine of a model; its keywords are settings of the engine."""


def small_engine(model: Any, **settings: Any) -> LLMEngine:
    """Builds an engine of a patched model, without a tokenizer."""
    usual = {"kv_cache_memory": 4 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return build_engine(model, None, EngineConfig(**{**usual, **settings}))


def prompt(length: int, seed: int) -> list[int]:
    """Returns random token ids."""
    ids: list[int] = tiny_ids(1, length, seed)[0].tolist()
    return ids


def exact_outputs(engine: LLMEngine, prompts: list[list[int]], params: Any = GREEDY) -> list[Any]:
    """Runs prompts; returns the tokens and exact log-probabilities of each one's sequences.

    All blocks and state slots have to be free again.
    """
    submit(engine, prompts, params)
    outputs = drain(engine)
    blocks = engine.scheduler.blocks
    assert blocks.free == blocks.num_blocks and blocks.swap.free == blocks.swap_blocks
    if blocks.states is not None:
        assert blocks.states.free == len(blocks.states), "a state slot is lost"
        assert blocks.swapped_states.free == len(blocks.swapped_states)
    return [[(o.token_ids, o.logprobs) for o in output.outputs] for output in outputs]


def prompt_lengths(*lengths: int) -> st.SearchStrategy[list[int]]:
    """Draws the lengths of one to seven prompts."""
    return st.lists(st.sampled_from(lengths), min_size=1, max_size=7)


def check_preempted(make: MakeEngine, memory: int, **settings: Any) -> list[LLMEngine]:
    """Asserts that engines with few blocks preempt, and answer as engines with a single request do.

    Args:
        make: builds engines, which by themselves have room.
        memory: for three sequences of five blocks together.
        settings: of the engines with few blocks.

    Returns:
        The engines with few blocks.
    """
    lengths = [28, 61, 29, 30, 31, 60]  # soon each needs one more block
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    expected = [exact_outputs(make(), [each], LONGER)[0] for each in prompts]
    few = {**_CROWDED, "kv_cache_memory": memory, **settings}
    crowded = [make(swap_space=size, **few) for size in (0, 1 << 20)]  # recomputed, and swapped
    for running in crowded:
        assert exact_outputs(running, prompts, LONGER) == expected
        assert running.scheduler.preemptions > 0
    return crowded


def check_forked(make: MakeEngine) -> None:
    """Asserts that several sequences of a prompt are those of an engine with this request alone."""
    params = [
        SamplingParams(n=n, temperature=1.0, seed=n, max_tokens=10, logprobs=1, ignore_eos=True)
        for n in (1, 4, 3)
    ]
    prompts = [prompt(length, length) for length in (5, 40, 17)]
    together = exact_outputs(make(), prompts, params)
    assert len({tuple(tokens) for tokens, _ in together[1]}) > 1
    for number, each in enumerate(params):
        assert exact_outputs(make(max_num_seqs=4), [prompts[number]], each)[0] == together[number]
