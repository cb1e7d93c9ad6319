"""Loading of adapters beside running requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import random_adapter
from tests.support.models import tiny
from torch_armllm import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from torch_armllm.engine.errors import RequestAbortedError
from torch_armllm.lora import adapter_table

PROMPT = list(range(5, 25))
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "skip_tokenizer_init": True,
    "progress": False,
}
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("adapters")
    model = tiny("llama")
    for number in range(2):
        random_adapter(model, path / f"adapter-{number}", number + 1, 1.0)
    model.save_pretrained(path / "base")
    return path


class SlowDisk:
    """Holds the reading of adapters until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        read = adapter_table.read_adapter

        def wait_and_read(path: str | Path) -> Any:
            self.asked.set()
            assert self.go_on.wait(30)
            return read(path)

        patch.setattr(adapter_table, "read_adapter", wait_and_read)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on.set()


def request(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number + 1, str(folder / f"adapter-{number}"))


async def tokens(outputs: AsyncGenerator[RequestOutput, None]) -> list[int]:
    last = [output async for output in outputs][-1]
    return list(last.outputs[0].token_ids)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "by-a-request"])
def test_requests_go_on_while_an_adapter_is_read(folder: Path, disk: SlowDisk, ahead: bool) -> None:
    async def run() -> list[int]:
        llm = AsyncLLM(str(folder / "base"), **SETTINGS)
        running = llm.generate(PROMPT, LONG)
        await anext(running)
        if ahead:
            work: asyncio.Task[Any] = asyncio.create_task(llm.add_lora(request(folder, 0)))
        else:
            work = asyncio.create_task(tokens(llm.generate(PROMPT, SHORT, lora_request=request(folder, 0))))
        await asyncio.to_thread(disk.asked.wait, 30)
        assert len(await tokens(running)) == 400  # it waits for no adapter, nor does a new one
        assert len(await tokens(llm.generate(PROMPT, SHORT))) == 8
        assert not work.done() and llm.llm_engine.list_loras() == []
        disk.go_on.set()
        found = await work
        assert [each.lora_name for each in llm.llm_engine.list_loras()] == ["adapter-0"]
        if ahead:
            found = await tokens(llm.generate(PROMPT, SHORT, lora_request=request(folder, 0)))
        llm.shutdown()
        return list(found)

    found = asyncio.run(run())
    disk.go_on.set()
    expected = LLM(str(folder / "base"), **SETTINGS).generate(
        [PROMPT], SHORT, use_tqdm=False, lora_request=request(folder, 0)
    )
    assert found == list(expected[0].outputs[0].token_ids)


def test_requests_that_wait_for_an_adapter_can_be_aborted(folder: Path, disk: SlowDisk) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(folder / "base"), **SETTINGS)
        outputs = llm.generate(PROMPT, SHORT, "waits", lora_request=request(folder, 0))
        waiting = asyncio.create_task(tokens(outputs))
        await asyncio.to_thread(disk.asked.wait, 30)
        await llm.abort("waits")
        with pytest.raises(RequestAbortedError, match="'waits' was aborted"):
            await waiting
        disk.go_on.set()
        again = llm.generate(PROMPT, SHORT, "waits", lora_request=request(folder, 0))
        assert len(await tokens(again)) == 8
        llm.shutdown()

    asyncio.run(run())


def test_wrong_and_canceled_loads_lose_nothing(folder: Path, disk: SlowDisk, tmp_path: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(folder / "base"), **SETTINGS)
        canceled = asyncio.create_task(tokens(llm.generate(PROMPT, SHORT, lora_request=request(folder, 0))))
        await asyncio.to_thread(disk.asked.wait, 30)
        canceled.cancel()
        disk.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await canceled
        with pytest.raises(ValueError, match="cannot be read"):
            await llm.add_lora(LoRARequest("none", 3, str(tmp_path)))
        with pytest.raises(ValueError, match="cannot be read"):
            await tokens(llm.generate(PROMPT, SHORT, lora_request=LoRARequest("none", 3, str(tmp_path))))
        await llm.add_lora(request(folder, 1))
        with pytest.raises(ValueError, match="another id"):
            await tokens(llm.generate(PROMPT, SHORT, lora_request=LoRARequest("other", 2, str(tmp_path))))
        assert [each.lora_name for each in llm.llm_engine.list_loras()] == ["adapter-1"]
        assert len(await tokens(llm.generate(PROMPT, SHORT, lora_request=request(folder, 1)))) == 8
        llm.shutdown()

    asyncio.run(run())
