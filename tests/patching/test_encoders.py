"""Encoders, whose tokens attend to later ones: hidden states, heads, padding, positions and token types."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import torch_armllm
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 70,
    "num_labels": 3,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "RobertaConfig": {"pad_token_id": 1, "type_vocab_size": 1},
    "XLMRobertaConfig": {"pad_token_id": 1, "type_vocab_size": 1},
    "DistilBertConfig": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 80},
    "ModernBertConfig": {
        **{"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    },
    "ElectraConfig": {"embedding_size": 32},
    "MPNetConfig": {"max_position_embeddings": 300, "pad_token_id": 1},
    "Gemma3TextConfig": {
        **{"head_dim": 32, "num_key_value_heads": 1, "use_bidirectional_attention": True},
        **{"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    },
}
MODELS = [
    ("BertConfig", "AutoModel"),
    ("BertConfig", "AutoModelForMaskedLM"),
    ("RobertaConfig", "AutoModelForSequenceClassification"),
    ("XLMRobertaConfig", "AutoModelForTokenClassification"),
    ("ModernBertConfig", "AutoModel"),
    ("ModernBertConfig", "AutoModelForSequenceClassification"),
    ("DistilBertConfig", "AutoModelForSequenceClassification"),
    ("NomicBertConfig", "AutoModel"),
    ("MegatronBertConfig", "AutoModel"),  # its own attention, which is recognized in the graph
    ("MPNetConfig", "AutoModel"),  # with a learned bias of distance
    ("Gemma3TextConfig", "AutoModel"),
]
LENGTHS = (37, 20, 1, 9)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        yield


def encoder(config: str = "BertConfig", kind: str = "AutoModel", **overrides: Any) -> Any:
    """A model whose norms, biases and embeddings are all random."""
    random = torch.Generator().manual_seed(3)
    options = {**SIZES, **OVERRIDES.get(config, {}), **overrides}
    model = getattr(transformers, kind).from_config(getattr(transformers, config)(**options)).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() == 1:
            parameter.copy_(noise * 0.3 + ("weight" in name))
        else:
            parameter.copy_(noise * (0.5 if "emb" in name else 1.5 * parameter.shape[-1] ** -0.5))
    return model


def texts(model: Any, left: bool = False) -> dict[str, Tensor]:
    """Texts of different lengths, padded on one side."""
    random = torch.Generator().manual_seed(5)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, 90, mask.shape, generator=random) * mask
    ids += (1 - mask) * (model.config.pad_token_id or 0)
    return {"input_ids": ids.flip(1) if left else ids, "attention_mask": mask.flip(1) if left else mask}


def tensors(out: Any, mask: Tensor) -> dict[str, Tensor]:
    """Results without those of padding."""
    found = {name: value for name, value in out.items() if isinstance(value, Tensor)}
    return {name: v[mask.bool()] if v.shape[:2] == mask.shape else v for name, v in found.items()}


def patched(model: Any, quantization: str | None = None, **options: Any) -> Any:
    """Patches a model; module calls fail from then on."""
    report = torch_armllm.patch(model, quantization, progress=False, **options)
    assert report.captured and not report.notes, report
    forward = patched_forward(model)
    assert forward is not None and isinstance(forward.plan, NativePlan)
    return model


@pytest.mark.parametrize(("config", "kind"), MODELS)
def test_results_equal_transformers(config: str, kind: str) -> None:
    model = encoder(config, kind)
    right, left = texts(model), texts(model, left=True)
    one = {"input_ids": right["input_ids"][:1]}
    inputs = [right, one]
    if kind != "AutoModelForSequenceClassification":  # it would read the padding before a text
        inputs.append(left)
    expected = [model(**each) for each in inputs]
    patched(model)
    for each, values in zip(inputs, expected, strict=True):
        mask = each.get("attention_mask", torch.ones_like(each["input_ids"]))
        found, wanted = tensors(model(**each), mask), tensors(values, mask)
        if each is left:
            wanted.pop("pooler_output", None)
        assert set(wanted) <= set(found)
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_biases_reach_farther_than_a_sample() -> None:
    model = encoder("MPNetConfig", num_hidden_layers=1)
    ids = torch.randint(3, 90, (1, 280), generator=torch.Generator().manual_seed(1))
    expected = model(ids).last_hidden_state
    assert torch.allclose(patched(model)(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_token_types_and_positions_are_read() -> None:
    model = encoder()
    inputs = texts(model)
    random = torch.Generator().manual_seed(7)
    shape = inputs["input_ids"].shape
    inputs["token_type_ids"] = torch.randint(0, 2, shape, generator=random)
    inputs["position_ids"] = torch.randint(0, 70, shape, generator=random)
    expected = model(**inputs)
    patched(model)
    found = model(**inputs)
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[0][mask], expected[0][mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    ids, attention, types, positions = inputs.values()
    assert torch.equal(model(ids, attention, types, positions, return_dict=False)[1], found.pooler_output)
    with pytest.raises(IndexError, match="token types must be in 0 … 1"):
        model(ids, token_type_ids=types + 1)
    with pytest.raises(IndexError, match="token ids must be in 0 … 89; the input has 0 … 90"):
        model(torch.tensor([[0, 90]]))
    with pytest.raises(ValueError, match="reaches position 70, but max_position_embeddings is 70"):
        model(torch.ones(1, 71, dtype=torch.int64))


def test_texts_have_the_same_bits_alone_and_padding_holds_zeros_or_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = patched(encoder(), "int8")
    inputs = texts(model)
    together = model(**inputs).last_hidden_state
    for number, length in enumerate(LENGTHS):
        alone = model(inputs["input_ids"][number : number + 1, :length]).last_hidden_state[0]
        assert torch.equal(together[number, :length], alone)
        assert not bool(together[number, length:].any())
    monkeypatch.setattr("torch_armllm.patching.forwards.text_steps._MOST_TOKENS", 30)
    assert torch.equal(model(**inputs).last_hidden_state, together)  # in several steps
    left = model(**texts(model, left=True)).last_hidden_state
    assert torch.equal(left[1, :17], left[1, 17].expand(17, -1))
    empty = model(inputs["input_ids"], attention_mask=torch.zeros_like(inputs["input_ids"]))
    assert not bool(empty.last_hidden_state.any()) and empty.last_hidden_state.shape == together.shape
    assert model(torch.empty(0, 5, dtype=torch.int64)).last_hidden_state.shape == (0, 5, 64)


def test_a_token_that_is_not_finite_stays_in_its_text() -> None:
    model = encoder()
    model.get_input_embeddings().weight[5] = float("nan")
    patched(model, "int8")
    inputs = texts(model)
    inputs["input_ids"][:, 0] = 7
    expected = model(**inputs).last_hidden_state
    inputs["input_ids"][1, 3] = 5
    found = model(**inputs).last_hidden_state
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert bool(found[1, : LENGTHS[1]].isnan().any())


def test_masks_with_holes() -> None:
    """Full attention does not care where a token is; a window does."""
    for config in ("BertConfig", "ModernBertConfig"):
        model = encoder(config)
        inputs = texts(model)
        inputs["attention_mask"][0, 4:11] = 0
        expected = model(**inputs)
        patched(model)
        mask = inputs["attention_mask"].bool()
        if config == "BertConfig":
            found = model(**inputs)
        else:
            with pytest.warns(UserWarning, match="the attention mask leaves out tokens within a text"):
                found = model(**inputs)
        torch.testing.assert_close(found[0][mask], expected[0][mask], rtol=1e-4, atol=1e-4)


def test_default_is_int8_and_unpatch_restores(tmp_path: Path) -> None:
    model = encoder(kind="AutoModelForSequenceClassification")
    inputs = texts(model)
    expected = model(**inputs).logits
    report = torch_armllm.patch(model, keep_original=True, progress=False)
    assert report.captured and {layer.scheme for layer in report.quantized} == {"int8"}
    found = model(**inputs).logits
    assert 0 < float((found - expected).norm()) < 0.15 * float(expected.norm())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert patched_forward(loaded) is not None and torch.equal(loaded(**inputs).logits, found)
    torch_armllm.unpatch(model)
    assert torch.equal(model(**inputs).logits, expected)


def test_calls_that_a_plan_cannot_serve_run_by_modules() -> None:
    model = encoder()
    inputs = texts(model)
    expected = model(**inputs, output_hidden_states=True)
    embedded = model(inputs_embeds=torch.ones(1, 5, 64))
    patched(model)
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        found = model(**inputs, output_hidden_states=True)
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    with pytest.warns(UserWarning, match="inputs_embeds are given"):
        assert torch.equal(model(inputs_embeds=torch.ones(1, 5, 64))[0], embedded[0])


def test_bfloat16_and_int4() -> None:
    model = encoder(hidden_size=128, intermediate_size=256).bfloat16()
    inputs, mask = texts(model), texts(model)["attention_mask"].bool()
    expected = model(**inputs).last_hidden_state[mask].float()
    report = torch_armllm.patch(model, "int4", progress=False)
    assert report.captured and "g32iz" in {layer.scheme for layer in report.quantized}
    found = model(**inputs).last_hidden_state
    assert found.dtype == torch.bfloat16
    assert float((found[mask].float() - expected).norm()) < 0.4 * float(expected.norm())


def test_a_decoder_that_attends_to_later_tokens_runs_by_modules() -> None:
    model = encoder(kind="AutoModelForCausalLM")
    report = torch_armllm.patch(model, None, progress=False)
    assert (
        report.capture_reason == "BertLMHeadModel predicts next tokens, but its tokens attend to later ones"
    )
    assert "generate" not in vars(model)
