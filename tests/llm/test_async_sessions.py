"""Conversations that `AsyncLLM` saves and loads while it serves others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_outputs import prompt
from tests.support.models import tiny
from torch_armllm import SamplingParams, patch
from torch_armllm.llm.async_llm import AsyncLLM

CHAT, OTHER = prompt(80, 1), prompt(20, 2)


def llm_of(model: Any) -> AsyncLLM:
    return AsyncLLM(model, skip_tokenizer_init=True, progress=False, kv_cache_memory=4 << 20, max_num_seqs=4)


async def last(llm: AsyncLLM, ids: list[int], count: int) -> Any:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = [output async for output in llm.generate(ids, params)]
    return outputs[-1]


def test_sessions_go_on_beside_other_requests(tmp_path: Path) -> None:
    model = tiny("llama")
    patch(model, progress=False)
    path = tmp_path / "session"
    first, second = llm_of(model), llm_of(model)

    async def main() -> None:
        other = asyncio.create_task(last(first, OTHER, 40))
        await first.save_session(path, CHAT)  # nothing of it is computed yet
        expected = (await other).outputs[0].token_ids
        other = asyncio.create_task(last(second, OTHER, 40))
        assert await second.load_session(path) == CHAT
        found = await last(second, [*CHAT, 7], 8)
        assert found.num_cached_tokens == 64
        assert found.outputs[0].token_ids == (await last(first, [*CHAT, 7], 8)).outputs[0].token_ids
        assert (await other).outputs[0].token_ids == expected
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match="is damaged"):
            await second.load_session(path)

    try:
        asyncio.run(main())
    finally:
        first.shutdown()
        second.shutdown()
