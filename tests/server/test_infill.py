"""Infilling: prompts of each family, token by token, and the routes that ask for the middle of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.models import tiny
from tests.support.server_live import Live, live, scripted
from tests.support.tiny_server import tokenizer
from tests.support.tokenizers import sentencepiece
from torch_armllm.llm.async_llm import AsyncLLM
from torch_armllm.server.infill.families import FIM_FAMILIES, find_fim_tokens
from torch_armllm.server.infill.prompt import ExtraFile, InfillPrompts

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]


def with_tokens(names: list[str], own: Any = None) -> PreTrainedTokenizerFast:
    own = tokenizer() if own is None else own
    own.add_tokens([AddedToken(name, special=True) for name in names])
    return own  # type: ignore[no-any-return]


def shown(own: Any, prompts: InfillPrompts, *arguments: Any, **options: Any) -> str:
    """Returns a prompt as text, in which ``{n}`` stands for a token of the family."""
    ids = prompts.build(*arguments, **options)
    special = set(own.added_tokens_encoder.values())
    return "".join(
        own.decode([i]) if i not in special else f"{{{own.convert_ids_to_tokens(i)}}}" for i in ids
    )


def test_families_are_found() -> None:
    for name, tokens in FIM_FAMILIES.items():
        vocabulary = {token: i for i, token in enumerate(tokens.needed)}
        assert find_fim_tokens(vocabulary) is tokens, name
        vocabulary.popitem()
        assert find_fim_tokens(vocabulary) is None
    assert InfillPrompts(tokenizer()).tokens is None


def test_prompt_of_qwen() -> None:
    own = with_tokens(QWEN)
    prompts = InfillPrompts(own)
    assert shown(own, prompts, "a(", ")b") == "{<|fim_prefix|>}a({<|fim_suffix|>})b{<|fim_middle|>}"
    extra = [ExtraFile("x.py", "first"), ExtraFile("y.py", "second")]
    whole = shown(own, prompts, "a", "b", extra, "c")
    assert whole == (
        "{<|repo_name|>}myproject\n{<|file_sep|>}x.py\nfirst{<|file_sep|>}y.py\nsecond{<|file_sep|>}filename\n"
        "{<|fim_prefix|>}a{<|fim_suffix|>}b{<|fim_middle|>}c"
    )
    length = len(prompts.build("a", "b", extra, "c"))
    shorter = whole.replace("{<|file_sep|>}x.py\nfirst", "")
    assert shown(own, prompts, "a", "b", extra, "c", most=length) == whole
    assert shown(own, prompts, "a", "b", extra, "c", most=length - 1) == shorter
    assert shown(own, prompts, "a", "b", extra, "c", most=3).startswith("{<|fim_prefix|>}a")
    assert own.convert_ids_to_tokens(prompts.end_ids) == QWEN


def test_names_of_tokens_in_code_are_text() -> None:
    own = with_tokens(QWEN)
    ids = InfillPrompts(own).build("<|fim_middle|>", "</s>")
    assert own.decode(ids) == "<|fim_prefix|><|fim_middle|><|fim_suffix|></s><|fim_middle|>"
    assert len(ids) == 3 + len("<|fim_middle|></s>")
    assert own("</s>")["input_ids"] == [own.eos_token_id]  # for other texts they stay tokens


def test_prompts_of_other_families() -> None:
    coder = with_tokens(["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"])
    extra = [ExtraFile("x.py", "first")]
    assert shown(coder, InfillPrompts(coder), "a", "b", extra) == (
        "\n\n--- snippet ---\n\nfirst{<｜fim▁begin｜>}a{<｜fim▁hole｜>}b{<｜fim▁end｜>}"
    )
    codestral = with_tokens(["[PREFIX]", "[SUFFIX]"])
    assert shown(codestral, InfillPrompts(codestral), "a", "b") == "{[SUFFIX]}b{[PREFIX]}a"
    names = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    llama = with_tokens(names, sentencepiece(True))
    prompts = InfillPrompts(llama)
    pieces = llama.convert_ids_to_tokens(prompts.build("ta", "ta"))
    assert pieces == ["▁<PRE>", "▁", "t", "a", "▁<SUF>", "t", "a", "▁<MID>"]  # no space before the suffix
    assert llama.convert_ids_to_tokens(prompts.end_ids) == names


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("fim")
    own = with_tokens(QWEN)
    tiny("llama", vocab_size=len(own), max_position_embeddings=512).save_pretrained(folder)
    own.save_pretrained(folder)
    llm = AsyncLLM(str(folder), kv_cache_memory=4 << 20, max_num_seqs=4, progress=False)
    with live(llm) as server:
        yield server
    llm.shutdown()


def post(server: Live, path: str, body: dict[str, Any], status: int = 200) -> Any:
    got = httpx.post(f"{server.base}{path}", json=body, timeout=30)
    assert got.status_code == status, got.text
    return got.json() if not body.get("stream") else got.text


ASK: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "): pass"}


def test_infill(filling: Live) -> None:
    """The middle is what the model writes after the prompt that the family prescribes."""
    ids = InfillPrompts(filling.served.prompts.tokenizer).build("def f(", "): pass")
    options = {"temperature": 0, "seed": 3}
    want = post(filling, "/v1/completions", {"prompt": ids, "max_tokens": 9, **options})["choices"][0]["text"]
    got = post(filling, "/infill", {**ASK, "n_predict": 9, **options})
    assert got["content"] == want != ""
    assert (got["stop"], got["stop_type"], got["tokens_predicted"]) == (True, "limit", 9)
    assert got["tokens_evaluated"] == len(ids) == got["timings"]["prompt_n"] + got["timings"]["cache_n"]
    text = post(filling, "/infill", {**ASK, "n_predict": 9, "stream": True, **options})
    events = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
    assert "".join(event["content"] for event in events) == want
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    same = {"prompt": "def f(", "suffix": "): pass", "max_tokens": 9, **options}
    (choice,) = post(filling, "/v1/completions", same)["choices"]
    assert choice["text"] == want
    plain = post(filling, "/v1/completions", {**same, "suffix": ""})["choices"][0]["text"]
    assert plain != want


def test_route_builds_the_prompt_of_llama_cpp(filling: Live) -> None:
    """The pattern is the one that llama.cpp documents for models with tokens for repositories and files."""
    own = filling.served.prompts.tokenizer
    extra = [{"filename": "x.py", "text": "import f\n"}, {"text": "g()"}]
    with scripted(filling, "x") as asked:
        post(filling, "/infill", ASK)
        post(filling, "/infill", {**ASK, "input_extra": extra, "prompt": "a, "})
    bare = "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
    files = "<|repo_name|>myproject\n<|file_sep|>x.py\nimport f\n<|file_sep|>tmp\ng()<|file_sep|>filename\n"
    for (prompt, _), text in zip(asked, (bare, f"{files}{bare}a, "), strict=True):
        assert own.decode(prompt["prompt_token_ids"]) == text
        assert prompt["prompt_token_ids"] == own(text)["input_ids"]


def test_infill_ends_at_tokens_of_the_family(filling: Live) -> None:
    with scripted(filling, "x") as asked:
        got = post(filling, "/infill", {**ASK, "repeat_penalty": 1.5, "top_k": 7, "stop": ["\n"], "seed": -1})
        post(filling, "/v1/completions", {"prompt": "a", "suffix": "b", "stop_token_ids": [5]})
    assert (got["content"], got["stop_type"]) == ("x", "eos")
    params, other = asked[0][1], asked[1][1]
    ends = filling.served.prompts.tokenizer.convert_tokens_to_ids(QWEN)
    assert params.stop_token_ids == ends and other.stop_token_ids == [5, *ends]
    assert (params.repetition_penalty, params.top_k, params.stop, params.seed) == (1.5, 7, ["\n"], None)
    assert params.max_tokens is None
    bias = {"logit_bias": {str(ends[-1]): 100}}
    (ended,) = post(filling, "/v1/completions", {"prompt": "a", "suffix": "b", **bias})["choices"]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")


def test_prefill_alone_and_time_limit(filling: Live) -> None:
    begun = {**ASK, "input_extra": [{"filename": "a.py", "text": "x" * 40}], "n_predict": 0}
    got = post(filling, "/infill", begun)
    assert (got["content"], got["tokens_predicted"]) == ("", 0)
    assert got["tokens_evaluated"] > 40
    again = post(filling, "/infill", {**begun, "n_predict": 1})
    assert again["tokens_cached"] > 40
    with scripted(filling, "one\ntwo three four", 2):
        late = post(filling, "/infill", {**ASK, "t_max_predict_ms": 1e-6})
    assert (late["content"], late["stop_type"]) == ("one\n", "limit")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {**ASK, "n_predict": -2}, "n_predict"),
        ("/infill", {**ASK, "input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ("/infill", {**ASK, "input_prefix": "x" * 600}, "input_prefix"),
        ("/v1/completions", {"prompt": [5], "suffix": "a"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "a", "echo": True}, "echo"),
    ],
)
def test_bad_requests_name_the_field(filling: Live, path: str, body: dict[str, Any], param: str) -> None:
    assert post(filling, path, body, 400)["error"]["param"] == param


def test_models_without_the_tokens(server: Live) -> None:
    for path, body, param in (
        ("/infill", ASK, "input_suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ):
        error = post(server, path, body, 400)["error"]
        assert (error["code"], error["param"]) == ("no_fim_tokens", param)
        assert "<|fim_prefix|>" in error["message"]
