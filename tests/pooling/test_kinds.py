"""Kinds of pooling models: encoders, cross-encoders, language models that score by tokens, and the choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.support.pooling_folders import TEXTS, pooling_folder, with_modules
from tests.support.tiny_server import tokenizer
from torch_armllm import LLM, PoolingParams
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.pooling.activation import activation_of
from torch_armllm.pooling.runner import choose_runner

EXACT: dict[str, Any] = {"quantization": None, "progress": False}


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with BERT's tokens around texts, and token types."""
    backend = tokenizer().backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=names,
        pad_token="<pad>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=64,
    )


def encoder_folder(folder: Path, family: str, kind: Any, labels: int = 1) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=66,
        pad_token_id=0,
        num_labels=labels,
    )
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    pair_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def test_an_encoder_pools_its_first_token(tmp_path: Path) -> None:
    llm = LLM(str(encoder_folder(tmp_path, "roberta", AutoModel)), **EXACT)
    assert llm.max_model_len == 65  # of 66 positions, the padding token has one
    found = llm.embed(TEXTS, use_tqdm=False)
    model = AutoModel.from_pretrained(tmp_path).eval()
    for text, output in zip(TEXTS, found, strict=True):
        states = model(input_ids=torch.tensor([pair_tokenizer()(text)["input_ids"]])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states[0], dim=0)
        vector = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(vector, wanted, rtol=1e-4, atol=1e-5)
        (alone,) = llm.embed(text, use_tqdm=False)
        torch.testing.assert_close(torch.tensor(alone.outputs.embedding), vector, rtol=1e-4, atol=1e-5)
    (empty,) = llm.embed("", use_tqdm=False)
    assert empty.prompt_token_ids == [1, 2]


def test_a_cross_encoder_equals_sentence_transformers(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    folder = encoder_folder(tmp_path, "bert", AutoModelForSequenceClassification)
    llm = LLM(str(folder), **EXACT)
    wanted = st.CrossEncoder(str(folder), device="cpu").predict([("a query", text) for text in TEXTS])
    found = llm.score("a query", TEXTS, use_tqdm=False)
    assert [each.outputs.score for each in found] == pytest.approx(wanted.tolist(), abs=1e-5)
    with pytest.raises(ValueError, match="this input has 210 tokens, and the model takes 66"):
        llm.score("a query", "x" * 200)
    cut = llm.score("a query", "x" * 200, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert len(cut[0].prompt_token_ids) == 66 and cut[0].prompt_token_ids[-1] == 2


@torch.no_grad()
def test_a_language_model_scores_by_tokens(tmp_path: Path) -> None:
    folder = pooling_folder(tmp_path, "generate", max_position_embeddings=512)
    overrides = {"classifier_from_token": ["N", "Y"], "is_original_qwen3_reranker": True}
    llm = LLM(str(folder), runner="pooling", hf_overrides=overrides, **EXACT)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    no, yes = tokenizer().convert_tokens_to_ids(["N", "Y"])
    found = llm.score("a query", TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, found, strict=True):
        prompt = tokenizer().decode(output.prompt_token_ids)
        assert prompt.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
        assert prompt.endswith(
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            f"<Query>: a query\n<Document>: {text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        wanted = torch.stack([logits[no], logits[yes]]).softmax(0)[1]
        assert output.outputs.score == pytest.approx(float(wanted), abs=1e-5)
        begin, query = prompt.split("<Instruct>")[0], prompt.split("<Instruct>")[1].split("<Document>")[0]
        (same,) = llm.score(begin + "<Instruct>" + query, f"<Document>: {text}", use_tqdm=False)
        assert same.prompt_token_ids == output.prompt_token_ids  # a client may bring the template
    (cut,) = llm.score("a", "x" * 500, PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert tokenizer().decode(cut.prompt_token_ids).endswith("</think>\n\n")
    assert len(cut.prompt_token_ids) == 512
    for tokens in (["N"], ["N", "no such token"]):
        with pytest.raises(ValueError, match="classifier_from_token is"):
            LLM(str(folder), runner="pooling", hf_overrides={"classifier_from_token": tokens}, **EXACT)


def test_a_quantized_folder_of_a_language_model_pools(tmp_path: Path) -> None:
    source = pooling_folder(tmp_path / "float", "generate")
    with_modules(source, {"Pooling": {"pooling_mode": "mean"}})
    quantize_folder(source, tmp_path / "packed", "int8", progress=False)
    overrides = {"classifier_from_token": ["N", "Y"]}
    for options in ({}, {"hf_overrides": overrides}):
        scores = []
        for folder in ("float", "packed"):
            llm = LLM(str(tmp_path / folder), quantization="int8", progress=False, **options)
            found = llm.score("a query", TEXTS, use_tqdm=False)
            scores.append([each.outputs.score for each in found])
        assert scores[1] == pytest.approx(scores[0], abs=1e-6 if not options else 0.02)  # the head is packed


@pytest.mark.parametrize(
    ("architecture", "runner"),
    [
        ("Qwen3ForCausalLM", "generate"),
        ("GPT2LMHeadModel", "generate"),
        ("Qwen3Model", "pooling"),
        ("BertForMaskedLM", "pooling"),
        ("Qwen3ForSequenceClassification", "pooling"),
        ("Qwen3ForTokenClassification", "pooling"),
        (None, "generate"),
    ],
)
def test_the_files_choose_the_runner(tmp_path: Path, architecture: str | None, runner: str) -> None:
    config = {} if architecture is None else {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose_runner(str(tmp_path)) == runner
    assert choose_runner(str(tmp_path), "generate") == "generate"
    with_modules(tmp_path, {"Pooling": {}})
    assert choose_runner(str(tmp_path)) == "pooling"
    assert choose_runner("smollm2") == choose_runner("model.gguf") == "generate"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"num_labels": 1}, [0.5]),
        ({"num_labels": 2}, [0.5, 0.5]),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, [0.5, 0.5]),
        ({"num_labels": 1, "problem_type": "regression"}, [0.0]),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            [0],
        ),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Identity"}, [0]),
    ],
)
def test_activations(fields: dict[str, Any], wanted: list[float]) -> None:
    config = AutoConfig.for_model("bert", **fields)
    assert activation_of(config)(torch.zeros(config.num_labels)).tolist() == wanted
    config.sbert_ce_default_activation_function = "torch.nn.Softplus"
    if "sentence_transformers" not in fields:
        with pytest.raises(ValueError, match=r"is 'torch.nn.Softplus'; Sigmoid, Identity, Softmax"):
            activation_of(config)
