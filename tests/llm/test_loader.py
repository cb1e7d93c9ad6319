"""Loading of engines from checkpoints and patched models, with tokenizers and caches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import torch_armllm
from tests.checkpoint.formats import test_gguf as gguf
from tests.llm.test_llm import tokenizer
from tests.support.models import tiny
from torch_armllm import LLM, AsyncLLM, SamplingParams
from torch_armllm.checkpoint import load
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.llm.loading.loader import engine_config, load_engine
from torch_armllm.patching.state import patched_forward
from torch_armllm.quant.recipe import Recipe

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40, [5, 6, 7, 8], [3]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny("llama")
    torch_armllm.patch(made, progress=False)
    return made


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    model.save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def tokens(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_all_ways_to_load_yield_the_same_tokens(model: PreTrainedModel, folder: Path) -> None:
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert tokens(LLM(model)) == expected
    assert tokens(LLM(tiny("llama"), progress=False)) == expected
    assert tokens(LLM(str(folder))) == expected


def test_async_llm_yields_the_same_tokens(folder: Path) -> None:
    llm = AsyncLLM(str(folder), max_num_seqs=3, progress=False)
    expected = tokens(LLM(llm.model))

    async def last(prompt: list[int]) -> list[int]:
        return [output.outputs[0].token_ids async for output in llm.generate(prompt, GREEDY)][-1]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(last(prompt) for prompt in 5 * PROMPTS))

    async def leave() -> None:
        async for _ in llm.generate(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)):
            break

    async def main_and_leave() -> list[list[int]]:
        await asyncio.gather(*(leave() for _ in range(10)))
        return await main()

    assert asyncio.run(main_and_leave()) == 5 * expected
    llm.shutdown()
    assert llm.llm_engine.scheduler.blocks.usage == 0.0


def test_tokenizer_options(model: PreTrainedModel, folder: Path) -> None:
    assert load_engine(ModelRequest(str(folder), skip_tokenizer_init=True)).tokenizer is None
    assert load_engine(ModelRequest(model, str(folder))).tokenizer is not None
    own = tokenizer()
    llm = LLM(model, own)
    assert llm.get_tokenizer() is own
    (output,) = llm.generate("Hi", GREEDY, use_tqdm=False)
    whole = output.prompt_token_ids + output.outputs[0].token_ids
    assert own.decode(output.prompt_token_ids) + output.outputs[0].text == own.decode(whole)
    with pytest.raises(ValueError, match="there is no tokenizer"):
        LLM(model).get_tokenizer()  # the model comes from nowhere


def test_logprobs_contain_token_strings(model: PreTrainedModel) -> None:
    own = tokenizer()
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=0)
    for llm, text in ((LLM(model, own), own.decode), (LLM(model), lambda ids: None)):
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert output.outputs[0].logprobs and output.prompt_logprobs
        for logprobs in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
            assert logprobs
            assert all(one.decoded_token == text([token]) for token, one in logprobs.items())


def test_kv_cache_dtypes(folder: Path) -> None:
    for model in (str(folder), tiny("llama")):
        loaded = load_engine(ModelRequest(model, progress=False), cached_as("int8"))
        forward = patched_forward(loaded.model)
        assert forward is not None
        assert forward.shape.dtype is torch.int8
    with pytest.raises(ValueError, match="patched for int8 caches: patch it with kv_cache_dtype='float16'"):
        load_engine(ModelRequest(loaded.model), cached_as("float16"))


def cached_as(cache: str) -> EngineConfig:
    return engine_config({"kv_cache_dtype": cache})


@pytest.mark.parametrize("dtype", ["int8", "nonsense"])
def test_weight_dtypes(folder: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"dtype must be auto, .*, not '{dtype}'"):
        load_engine(ModelRequest(str(folder), dtype=dtype))


def test_weights_larger_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    monkeypatch.setattr(load, "free_memory", lambda: 200_000)
    loaded = load.load_model(str(tmp_path), kv_cache_dtype="int8", quantization=Recipe())
    assert torch_armllm.is_patched(loaded)
    assert loaded.hf_quantizer.quantization_config.recipe.scheme == "g32iz"
    assert "and 0.0 GB are free: each layer is quantized as it is read" in caplog.text
    assert patched_forward(loaded).shape.dtype is torch.int8
    monkeypatch.setattr(load, "free_memory", lambda: 2_000_000)
    assert not torch_armllm.is_patched(load.load_model(str(tmp_path), quantization=Recipe()))


def test_weights_of_other_tools_saved_unpatched_run_as_they_are(tmp_path: Path) -> None:
    gguf.write(tmp_path / "tiny.gguf", "Q4_1")
    model = torch_armllm.load(str(tmp_path / "tiny.gguf"), dtype=torch.float32, fuse=False)
    model.save_pretrained(tmp_path / "saved")
    config = tmp_path / "saved" / "config.json"
    assert json.loads(config.read_text())["quantization_config"]["fuse"] is False
    llm = LLM(str(tmp_path / "saved"), skip_tokenizer_init=True, kv_cache_memory=1 << 20)
    ids = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    expected = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=6)
    assert list(ids) == expected[0, 3:].tolist()
    with pytest.raises(ValueError, match="to use 'int8', load the original model"):
        LLM(str(tmp_path / "saved"), quantization="int8", skip_tokenizer_init=True)
