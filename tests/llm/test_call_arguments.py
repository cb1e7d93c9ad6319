"""Arguments of vLLM's calls: those that have a meaning here, and those that are refused by name."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiny_server import checkpoint
from torch_armllm import LLM, AsyncLLM, BeamSearchParams, LoRARequest, PoolingParams, SamplingParams
from torch_armllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from torch_armllm.engine.sampling_params import StructuredOutputsParams
from torch_armllm.engine.text.preprocess import NewRequest
from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.llm.calls.call_arguments import REASONS
from torch_armllm.pooling.outputs import PoolingRequestOutput
from torch_armllm.pooling.pooling_params import chosen_task

PARAMS = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(checkpoint(tmp_path_factory.mktemp("tiny"))), progress=False)


def test_one_priority_is_for_all_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    add = llm.llm_engine.add_request

    def noted(new: NewRequest) -> None:
        given.append(new.priority)
        add(new)

    monkeypatch.setattr(llm.llm_engine, "add_request", noted)
    for priority in (2, [2, 2], None):
        llm.generate(["a", "b"], PARAMS, use_tqdm=False, priority=priority)
    talk = [{"role": "user", "content": "a"}]
    llm.chat([talk, talk], PARAMS, use_tqdm=False, priority=3)
    assert given == [2, 2, 2, 2, 0, 0, 3, 3]
    with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], PARAMS, priority=[1])


def prompt_of(llm: LLM, prompt: Any, **how: Any) -> str:
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False, tokenization_kwargs=how)
    assert output.prompt == (prompt if isinstance(prompt, str) else None)
    return str(llm.get_tokenizer().decode(output.prompt_token_ids))


def test_prompts_are_cut_where_asked(llm: LLM) -> None:
    assert prompt_of(llm, "abcdef", truncate_prompt_tokens=3) == "def"
    assert prompt_of(llm, "abcdef", truncation=True, max_length=3) == "def"
    assert prompt_of(llm, "abcdef", truncation=True, max_length=9) == "abcdef"
    assert prompt_of(llm, "abcdef", truncate_prompt_tokens=3, truncation_side="right") == "abc"
    tokens = llm.get_tokenizer()("abcdef")["input_ids"]
    assert prompt_of(llm, tokens, truncate_prompt_tokens=2) == "ef"
    most = llm.llm_engine.preprocessor.max_model_len
    assert prompt_of(llm, "x" * most + "y", truncate_prompt_tokens=-1) == "x" * (most - 4) + "y"
    talk = [{"role": "user", "content": "a"}]
    (output,) = llm.chat(talk, PARAMS, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 5})
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "ant|>"

    async def tokens_of(prompt: str) -> list[int]:
        other = AsyncLLM(llm.model, llm.get_tokenizer(), progress=False)
        try:
            async for each in other.generate(
                prompt, PARAMS, tokenization_kwargs={"truncate_prompt_tokens": 2}
            ):
                found = each
            return found.prompt_token_ids
        finally:
            other.shutdown()

    assert asyncio.run(tokens_of("abcdef")) == tokens[-2:]


def test_tokens_around_a_text_stay() -> None:
    class Around:
        def __call__(self, text: str, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
            inner = list(range(10, 10 + len(text)))
            if not add_special_tokens:
                return {"input_ids": inner, "special_tokens_mask": [0] * len(inner)}
            return {"input_ids": [1, *inner, 2], "special_tokens_mask": [1, *[0] * len(inner), 1]}

    tokenizer: Any = Around()
    assert Tokenization().ids(tokenizer, "abcd", 4) == [1, 12, 13, 2]
    assert Tokenization(truncation_side="right").ids(tokenizer, "abcd", 4) == [1, 10, 11, 2]
    assert Tokenization(add_special_tokens=False).ids(tokenizer, "abcd", 2) == [12, 13]
    assert Tokenization(add_special_tokens=False).ids(tokenizer, "abcd", None) == [10, 11, 12, 13]
    assert Tokenization().ids(tokenizer, "abcd", 2) == [13, 2]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"padding": True}, "tokenization_kwargs sets padding"),
        ({"truncation": True}, "truncation without max_length"),
        ({"max_length": 3}, "max_length=3 has no effect"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"truncate_prompt_tokens": 512}, "max_model_len is 512"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "up"}, "truncation_side is 'up'"),
    ],
)
def test_bad_options_of_the_tokenization(llm: LLM, how: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        llm.generate("abc", PARAMS, tokenization_kwargs=how)


@pytest.mark.parametrize("name", sorted(set(REASONS) - {"lora_request", "tokenization_kwargs"}))
def test_arguments_of_vllm_alone_are_refused_by_name(llm: LLM, name: str) -> None:
    wrong: Any = {name: 1}
    beams = BeamSearchParams(1, 1)
    calls = {
        "generate": lambda given: llm.generate("a", PARAMS, use_tqdm=False, **given),
        "chat": lambda given: llm.chat([{"role": "user", "content": "a"}], PARAMS, use_tqdm=False, **given),
        "beam_search": lambda given: llm.beam_search("a", beams, **given),
        "encode": lambda given: llm.encode("a", **given),
    }
    for call, run in calls.items():
        with pytest.raises(ValueError, match=f"{name} is no argument of {call} here"):
            run(wrong)
    calls["generate"]({name: None})
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'priorit'"):
        llm.generate("a", priorit=1)  # type: ignore[call-arg]


def test_calls_that_pool_refuse_them_too(llm: LLM) -> None:
    for run in (llm.embed, llm.classify, llm.encode, lambda text, **given: llm.score(text, text, **given)):
        for name in ("lora_request", "tokenization_kwargs"):
            wrong: Any = {name: {}}
            with pytest.raises(ValueError, match=f"{name} is no argument of"):
                run("a", **wrong)


@pytest.mark.parametrize("name", ["prompt_embeds", "cache_salt", "encoder_prompt", "promt"])
def test_fields_of_a_prompt_that_nobody_reads(llm: LLM, name: str) -> None:
    with pytest.raises(ValueError, match=f"a prompt has no '{name}' here"):
        llm.generate({"prompt": "a", name: "b"}, PARAMS, use_tqdm=False)
    llm.generate({"prompt": "a", name: None}, PARAMS, use_tqdm=False)


def test_constructors_are_those_of_vllm() -> None:
    assert Logprob(logprob=-1.0) == Logprob(-1.0, None, None)
    whole = CompletionOutput(0, "a", [1], None, None, finish_reason="stop")
    output = RequestOutput("1", "p", [2], None, [whole], True)
    assert (output.outputs, output.finished, output.num_cached_tokens) == ([whole], True, 0)
    pooled = PoolingRequestOutput("1", None, [2], 0, True)
    assert (pooled.num_cached_tokens, pooled.finished) == (0, True)
    assert LoRARequest("a", 1, "b", base_model_name="c") == LoRARequest("a", 1, "b")
    for more, told in (
        ({"lora_path": ""}, "needs a lora_name and a lora_path"),
        ({"lora_path": "b", "tensorizer_config_dict": {}}, "tensorizer_config_dict={} is not supported"),
        ({"lora_path": "b", "load_inplace": True}, "load_inplace=True is not supported by LoRARequest"),
    ):
        with pytest.raises(ValueError, match=told):
            LoRARequest("a", 1, **more)  # type: ignore[arg-type]


def test_tasks_of_parameters() -> None:
    embed, known = PoolingParams(task="embed"), ("classify", "embed")
    assert chosen_task(None, [embed, PoolingParams()], known) == "embed"
    assert chosen_task(None, [PoolingParams()], known) == "classify"
    with pytest.raises(ValueError, match="this one has classify and embed"):
        chosen_task("classify", [embed], known)


@pytest.mark.parametrize(
    ("kind", "name", "neutral", "other"),
    [
        (SamplingParams, "flat_logprobs", False, True),
        (SamplingParams, "spaces_between_special_tokens", True, False),
        (SamplingParams, "logprob_token_ids", None, [1]),
        (SamplingParams, "truncate_prompt_tokens", None, 5),
        (StructuredOutputsParams, "disable_any_whitespace", False, True),
        (StructuredOutputsParams, "disable_additional_properties", None, True),
    ],
)
def test_parameters_of_vllm_alone_are_refused_by_name(kind: Any, name: str, neutral: Any, other: Any) -> None:
    given = {"json_object": True} if kind is StructuredOutputsParams else {"n": 2}
    plain = kind(**given, **{name: neutral})
    assert plain == kind(**given) == replace(plain) == pickle.loads(pickle.dumps(plain))
    assert "n" in inspect.signature(SamplingParams).parameters
    with pytest.raises(ValueError, match=f"{name}=.* is not supported by {kind.__name__} here: "):
        kind(**given, **{name: other})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        kind(**given, nothing=1)
