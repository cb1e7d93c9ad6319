"""The files of sentence-transformers: vectors equal those of sentence-transformers itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.pooling_folders import TEXTS, patched_model, pooling_folder, with_modules
from tests.support.tiny_server import tokenizer
from torch_armllm import LLM, PoolingParams, Recipe, is_patched, patch
from torch_armllm.patching.state import patched_forward
from torch_armllm.pooling.sentence_files import pool, read_sentence_files

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
MEAN = {"pooling_mode": "mean"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooling_folder(tmp_path_factory.mktemp("model"), "embed")


@pytest.fixture
def model() -> Any:
    """The model of the folder, patched once for all tests; each says in which folder its files are."""
    return patched_model("embed")


def llm(model: Any, folder: Path) -> LLM:
    model.name_or_path = str(folder)
    return LLM(model, tokenizer(), progress=False)


def vectors(model: Any, folder: Path, **options: Any) -> Tensor:
    found = llm(model, folder).embed(TEXTS, PoolingParams(), use_tqdm=False, **options)
    return torch.tensor([each.outputs.embedding for each in found])


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        *((mode, {}) for mode in MODES),
        (("cls", "mean"), {"normalize": True}),
        ("mean", {"dense": 24, "normalize": True}),
        ("lasttoken", {"normalize": True, "truncate_dim": 16}),
        ("mean", {"include_prompt": False, "prompt_name": "query"}),
        ("weightedmean", {"include_prompt": False, "prompt_name": "query"}),
        ("cls", {"prompt_name": "query"}),
    ],
)
def test_vectors_equal_sentence_transformers(
    saved: Path, model: Any, tmp_path: Path, kinds: Any, options: dict[str, Any]
) -> None:
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers.sentence_transformer import modules as models

    modules = [models.Transformer(str(saved))]
    modules.append(models.Pooling(64, kinds, include_prompt=options.get("include_prompt", True)))
    if "dense" in options:
        width = modules[-1].pooling_output_dimension
        modules.append(models.Dense(width, options["dense"], activation_function=torch.nn.Tanh()))
    if options.get("normalize"):
        modules.append(models.Normalize())
    truncate = options.get("truncate_dim")
    reference = st.SentenceTransformer(
        modules=modules, prompts={"query": "find: "}, device="cpu", truncate_dim=truncate
    )
    reference.save(str(tmp_path))
    if truncate:
        settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
        assert settings.get("truncate_dim", truncate) == truncate
        (tmp_path / "config_sentence_transformers.json").write_text(
            json.dumps({**settings, "truncate_dim": 16})
        )
    name = options.get("prompt_name")
    wanted = reference.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
    if truncate:  # sentence-transformers leaves what it cuts shorter than one
        wanted = torch.nn.functional.normalize(wanted, dim=1)
    torch.testing.assert_close(vectors(model, tmp_path, prompt_name=name), wanted, rtol=1e-4, atol=1e-5)


def test_sentence_transformers_runs_and_saves_patched_models(saved: Path, tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    kinds = st.sentence_transformer.modules
    modules = [kinds.Transformer(str(saved)), kinds.Pooling(64, "mean")]
    reference = st.SentenceTransformer(modules=modules, device="cpu")
    wanted = reference.encode(TEXTS)
    report = patch(reference[0].auto_model, replace(Recipe.of("int8"), importance=None), progress=False)
    assert report.captured and is_patched(reference[0].auto_model)
    forward = patched_forward(reference[0].auto_model)
    assert forward is not None
    forward.calls.module_forward = None  # type: ignore[assignment]  # the plan computes all
    found = torch.tensor(reference.encode(TEXTS))
    assert float(torch.cosine_similarity(found, torch.tensor(wanted)).min()) > 0.99
    del forward.calls.module_forward
    reference.save(str(tmp_path))
    packed = LLM(str(tmp_path), progress=False).embed(TEXTS, use_tqdm=False)
    vectors = torch.tensor([each.outputs.embedding for each in packed])
    torch.testing.assert_close(vectors, found, rtol=1e-4, atol=1e-5)


def test_older_files_are_read(model: Any, tmp_path: Path) -> None:
    flags = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    more: dict[str, Any] = {
        "sentence_bert_config": {"max_seq_length": 20, "do_lower_case": True},
        "config_sentence_transformers": {"prompts": {"a": "A: "}, "default_prompt_name": "a"},
    }
    with_modules(tmp_path, {"Pooling": flags}, **more)
    files = read_sentence_files(str(tmp_path))
    assert files.modes == ("cls", "mean") and files.normalize is False and files.max_tokens == 20
    engine = llm(model, tmp_path)
    assert engine.max_model_len == 20
    (output,) = engine.embed("B", use_tqdm=False)
    assert output.prompt_token_ids == tokenizer()("a: b")["input_ids"]
    assert output.outputs.hidden_size == 128
    with pytest.raises(ValueError, match="prompt_name is 'b'; this model has a"):
        engine.embed("b", prompt_name="b")
    with pytest.raises(ValueError, match="prompt_name is 'a', and the input is token ids"):
        engine.embed([1, 2], prompt_name="a")
    config = {"pooling_type": "LAST", "normalize": True}
    one = LLM(model, tokenizer(), progress=False, pooler_config=config).embed("b", use_tqdm=False)
    assert one[0].outputs.hidden_size == 64


def test_pooling_by_hand() -> None:
    hidden = torch.tensor([[1.0, 8.0], [2.0, 6.0], [6.0, 1.0]])
    wanted = {
        "cls": ([1, 8], [2, 6]),
        "lasttoken": ([6, 1], [6, 1]),
        "max": ([6, 8], [6, 6]),
        "mean": ([3, 5], [4, 3.5]),
        "mean_sqrt_len_tokens": ([9 / 3**0.5, 15 / 3**0.5], [8 / 2**0.5, 7 / 2**0.5]),
        "weightedmean": ([23 / 6, 23 / 6], [22 / 5, 3]),
    }
    for mode, (whole, after_one) in wanted.items():
        torch.testing.assert_close(pool(hidden, mode), torch.tensor(whole, dtype=torch.float32))
        torch.testing.assert_close(pool(hidden, mode, 1), torch.tensor(after_one, dtype=torch.float32))
        assert torch.equal(pool(hidden, mode, 3), pool(hidden, mode))  # a prompt and no text


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        ({"WordWeights": {}}, {}, "has a module 'WordWeights'; Transformer, Pooling, Dense and Normalize"),
        ({"Pooling": {"pooling_mode": "best"}}, {}, "pooling_mode of .* is 'best'; cls, max"),
        (
            {"Pooling": MEAN, "Dense": {"activation_function": "torch.nn.Softplus"}},
            {},
            "is 'Softplus'; supported",
        ),
        ({"Pooling": MEAN, "Dense": {"activation_function": None}}, {}, "has no model.safetensors"),
        ({"Pooling": MEAN, "Dense": {"use_residual": True}}, {}, "use_residual"),
        ({"Pooling": {}}, {}, "names 1_Pooling, and its config.json is absent or empty"),
        ({"Normalize": {}, "Dense": {}}, {}, "a Dense after a Normalize is not supported"),
        ({"Pooling": {}}, {"config_sentence_transformers": {"prompts": [1]}}, "are not texts by name"),
        ({"Pooling": {}}, {"config_sentence_transformers": [1]}, "an object is expected"),
        ({"Pooling": {}}, {"modules": {}}, "a list of modules is expected"),
        (
            {"Pooling": {}},
            {"sentence_bert_config": {"modality_config": {"message": {}}}},
            "makes texts messages of its chat template",
        ),
    ],
)
def test_unknown_and_damaged_files(
    tmp_path: Path, modules: dict[str, Any], files: dict[str, Any], message: str
) -> None:
    with_modules(tmp_path, modules, **files)
    with pytest.raises(ValueError, match=message):
        read_sentence_files(str(tmp_path))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match="modules.json is damaged"):
        read_sentence_files(str(tmp_path))
