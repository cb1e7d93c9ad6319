"""`LLM` with pooling models: results equal transformers', alone and batched, and errors are clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.pooling_folders import CLASSES, TEXTS, patched_model, pooling_folder, pooling_model
from tests.support.tiny_server import tokenizer
from torch_armllm import LLM, PoolingParams
from torch_armllm.llm import base
from torch_armllm.patching.state import patched_forward

EXACT: dict[str, Any] = {"quantization": None, "progress": False, "max_num_batched_tokens": 64}


def load(task: str, labels: int = 3) -> LLM:
    model = patched_model(task, labels)
    model.name_or_path = ""  # another test may have given it a folder
    return LLM(model, tokenizer(), **EXACT)


@pytest.fixture(scope="module")
def embedder() -> LLM:
    return load("embed")


@torch.no_grad()
def expected(llm: LLM, text: str, pair: str | None = None) -> Tensor:
    """Hidden states or logits of a text by transformers."""
    name = type(llm.model).__name__
    task = "tag" if "Token" in name else "classify" if "Sequence" in name else "embed"
    model = pooling_model(task, llm.model.config.num_labels)
    out = model(**tokenizer()(text, pair, return_tensors="pt"))
    found: Tensor = out.logits[0] if "logits" in out else out.last_hidden_state[0]
    return found


def vectors(llm: LLM, texts: Any, **params: Any) -> Tensor:
    found = llm.embed(texts, PoolingParams(**params), use_tqdm=False)
    return torch.tensor([each.outputs.embedding for each in found])


def test_embeddings_equal_transformers_alone_and_batched(embedder: LLM) -> None:
    forward = patched_forward(embedder.model)
    assert forward is not None
    found = vectors(embedder, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        last = torch.nn.functional.normalize(expected(embedder, text)[-1], dim=0)
        torch.testing.assert_close(vector, last, rtol=1e-4, atol=1e-5)
        assert torch.equal(vectors(embedder, text)[0], vector)
    ids = [tokenizer()(text)["input_ids"] for text in TEXTS]
    assert torch.equal(vectors(embedder, ids), found)
    assert torch.equal(vectors(embedder, [{"prompt": TEXTS[0]}, {"prompt_token_ids": ids[1]}]), found[:2])
    raw = vectors(embedder, TEXTS, normalize=False)
    torch.testing.assert_close(torch.nn.functional.normalize(raw, dim=1), found)
    assert torch.equal(vectors(embedder, TEXTS, use_activation=False), raw)
    short = vectors(embedder, TEXTS, dimensions=8)
    torch.testing.assert_close(short, torch.nn.functional.normalize(raw[:, :8], dim=1))
    assert embedder.embed([], use_tqdm=False) == []
    output = embedder.embed(TEXTS[1], use_tqdm=False)[0]
    assert output.outputs.hidden_size == 64 and output.prompt_token_ids == ids[1] and output.finished


def test_hidden_states_of_tokens(embedder: LLM) -> None:
    params = PoolingParams(normalize=False)
    found = embedder.encode(TEXTS, params, use_tqdm=False, pooling_task="token_embed")
    for text, output in zip(TEXTS, found, strict=True):
        torch.testing.assert_close(output.outputs.data, expected(embedder, text), rtol=1e-4, atol=1e-4)


def test_scores_of_vectors_are_cosines(embedder: LLM) -> None:
    found = embedder.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    query, *documents = vectors(embedder, TEXTS)
    for output, document in zip(found, documents, strict=True):
        assert output.outputs.score == pytest.approx(float(query @ document), abs=1e-6)
    each = embedder.score(TEXTS, TEXTS, use_tqdm=False)
    assert [output.outputs.score for output in each] == pytest.approx([1.0] * len(TEXTS), abs=1e-6)


@pytest.mark.parametrize("pad", [0, None])
def test_classes_equal_transformers(pad: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patched_model("classify").config, "pad_token_id", pad)
    llm = load("classify")
    found = llm.classify(TEXTS, use_tqdm=False)
    logits = llm.classify(TEXTS, PoolingParams(use_activation=False), use_tqdm=False)
    for text, output, raw in zip(TEXTS, found, logits, strict=True):
        wanted = expected(llm, text)
        torch.testing.assert_close(torch.tensor(raw.outputs.probs), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            torch.tensor(output.outputs.probs), wanted.softmax(0), rtol=1e-4, atol=1e-4
        )
        assert output.outputs.num_classes == 3
    with pytest.raises(ValueError, match="this model cannot score: it computes classify"):
        llm.score("a", "b")
    with pytest.raises(ValueError, match="does not compute 'embed'; it computes classify"):
        llm.embed("a")
    with pytest.raises(ValueError, match="dimensions is 2, but 'classify' makes no vectors"):
        llm.classify("a", PoolingParams(dimensions=2))


def test_scores_of_pairs_equal_transformers() -> None:
    scorer = load("classify", 1)
    found = scorer.score("a query", TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, found, strict=True):
        wanted = float(expected(scorer, "a query", text).sigmoid())
        assert output.outputs.score == pytest.approx(wanted, abs=1e-5)
    alone = scorer.score("a query", TEXTS[2], use_tqdm=False)
    assert alone[0].outputs.score == found[2].outputs.score
    raw = scorer.score(["a query"], TEXTS[2], PoolingParams(use_activation=False), use_tqdm=False)
    assert raw[0].outputs.score == pytest.approx(float(expected(scorer, "a query", TEXTS[2])), abs=1e-4)
    with pytest.raises(ValueError, match="there are 2 queries for 5 documents"):
        scorer.score(["a", "b"], TEXTS)


def test_classes_of_tokens_equal_transformers() -> None:
    llm = load("tag")
    for text, output in zip(TEXTS, llm.encode(TEXTS, use_tqdm=False), strict=True):
        wanted = expected(llm, text).softmax(-1)
        torch.testing.assert_close(output.outputs.data, wanted, rtol=1e-4, atol=1e-4)


def test_texts_are_cut_where_asked(embedder: LLM) -> None:
    text = "0123456789" * 20
    with pytest.raises(ValueError, match="this input has 200 tokens, and the model takes 128 .*=-1"):
        embedder.embed(text)
    with pytest.raises(ValueError, match="prompt 1: this input has 200 tokens"):
        embedder.embed(["a", text])
    ids = tokenizer()(text)["input_ids"]
    for most, kept in ((-1, 128), (5, 5)):
        cut = vectors(embedder, text, truncate_prompt_tokens=most)
        assert torch.equal(cut, vectors(embedder, ids[:kept]))
        assert torch.equal(cut, vectors(embedder, ids, truncate_prompt_tokens=most))
    with pytest.raises(ValueError, match="truncate_prompt_tokens is 129, and the model takes 128"):
        embedder.embed(text, PoolingParams(truncate_prompt_tokens=129))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "this input has no tokens; give a text that is not empty"),
        ([], {}, None),
        ([[]], {}, "no tokens"),
        ([[1, 259]], {}, "token id 259 is out of range: the model's ids end at 258"),
        ([[1, -1]], {}, "token id -1 is out of range"),
        ({"text": "a"}, {}, "needs 'prompt' or 'prompt_token_ids'; it has text"),
        ("a", {"dimensions": 65}, "dimensions is 65, and the model's vectors have 64"),
        ("x" * 10**6, {}, "shorten it"),
    ],
)
def test_bad_inputs(embedder: LLM, prompt: Any, params: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert embedder.embed(prompt, use_tqdm=False) == []
        return
    with pytest.raises(ValueError, match=message):
        embedder.embed(prompt, PoolingParams(**params))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"dimensions": 0}, ValueError, "dimensions is 0; give at least 1"),
        ({"dimensions": True}, TypeError, "dimensions is True; give an integer or None"),
        ({"truncate_prompt_tokens": -2}, ValueError, "is -2; give at least 1, or -1"),
        ({"normalize": 1}, TypeError, "normalize is 1; give True, False or None"),
    ],
)
def test_bad_parameters(params: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PoolingParams(**params)


def test_calls_of_the_other_kind_are_refused(embedder: LLM, tmp_path: Path) -> None:
    for call in (embedder.generate, embedder.stream):
        with pytest.raises(ValueError, match=r"this LLM pools \(embed, token_embed\), and"):
            call("a")
    with pytest.raises(ValueError, match="does not compute 'classify'; it computes embed, token_embed"):
        embedder.classify("a")
    with pytest.raises(ValueError, match="pooling_task is 'no'; give one of embed, token_embed"):
        embedder.encode("a", pooling_task="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pooling_params has 1 entries for 2 prompts"):
        embedder.embed(["a", "b"], [PoolingParams()])
    with pytest.raises(ValueError, match="runner is 'no'; give auto, generate or pooling"):
        LLM("none", runner="no")  # type: ignore[arg-type]
    pooling_folder(tmp_path, "generate")
    with pytest.raises(ValueError, match="is for pooling models: give runner='pooling'"):
        LLM(str(tmp_path), pooler_config={"normalize": True})
    with pytest.raises(ValueError, match="pooling_type is 'no'; give one of LAST, CLS, MEAN, MAX"):
        LLM(str(tmp_path), runner="pooling", pooler_config={"pooling_type": "no"}, **EXACT)
    with pytest.raises(ValueError, match="max_model_len is 129, and the model takes texts of at most 128"):
        LLM(str(tmp_path), runner="pooling", max_model_len=129, **EXACT)
    pooled = LLM(str(tmp_path), runner="pooling", pooler_config={"pooling_type": "MEAN"}, **EXACT)
    mean = vectors(pooled, TEXTS[0], normalize=False)[0]
    hidden = CLASSES["embed"].from_pretrained(tmp_path)(**tokenizer()(TEXTS[0], return_tensors="pt"))
    torch.testing.assert_close(mean, hidden.last_hidden_state[0].mean(0).detach(), rtol=1e-4, atol=1e-4)


def test_a_generating_model_does_not_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "load_engine", lambda *a, **k: (None, None, None))
    llm = LLM("none")
    for call in (llm.embed, llm.classify, llm.encode):
        with pytest.raises(ValueError, match="this LLM generates, and encode is for models that pool"):
            call("a")
    with pytest.raises(ValueError, match="this LLM generates, and score is for models that pool"):
        llm.score("a", "b")


def test_a_patched_language_model_pools() -> None:
    model = patched_model("generate")
    llm = LLM(model, tokenizer(), runner="pooling", progress=False)
    with torch.no_grad():
        hidden = pooling_model("generate").model(**tokenizer()(TEXTS[0], return_tensors="pt"))[0][0, -1]
    wanted = torch.nn.functional.normalize(hidden, dim=0)
    torch.testing.assert_close(vectors(llm, TEXTS[0])[0], wanted, rtol=1e-4, atol=1e-5)


def test_default_is_int8_and_saved_folders_are_kept(embedder: LLM, tmp_path: Path) -> None:
    llm = LLM(str(pooling_folder(tmp_path / "float", "embed")), progress=False)
    found = vectors(llm, TEXTS)
    assert float(torch.cosine_similarity(found, vectors(embedder, TEXTS)).min()) > 0.99
    for text, vector in zip(TEXTS, found, strict=True):
        assert torch.equal(vectors(llm, text)[0], vector)
    llm.model.save_pretrained(tmp_path / "packed")
    tokenizer().save_pretrained(tmp_path / "packed")
    assert torch.equal(vectors(LLM(str(tmp_path / "packed"), progress=False), TEXTS), found)
