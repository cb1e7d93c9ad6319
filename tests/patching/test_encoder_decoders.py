"""Models of an encoder and a decoder: parity with transformers, beams, padding, caches, quantized layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import torch_armllm
from torch_armllm.checkpoint.quantize_folder import quantize_folder
from torch_armllm.patching.cache.encoder_cache import EncoderCache
from torch_armllm.patching.forwards.attending_calls import AttendingCalls
from torch_armllm.patching.forwards.layer_calls import LayerCalls
from torch_armllm.patching.forwards.text_calls import TextCalls
from torch_armllm.patching.state import patched_forward
from torch_armllm.plan.native import NativePlan

VOCABULARY = 90
STACKS: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "max_position_embeddings": 150},
    **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 80},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
T5: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4},
    **{"num_layers": 3, "num_decoder_layers": 2},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {**STACKS, "scale_embedding": True}),
    "mbart": ("MBart", STACKS),
    "pegasus": ("Pegasus", {**STACKS, "activation_function": "relu"}),
    "marian": ("Marian", {**STACKS, "static_position_embeddings": True, "activation_function": "swish"}),
    "t5": ("T5", {**T5, "tie_word_embeddings": True}),
    "flan-t5": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "whisper": (
        "Whisper",
        {**STACKS, "max_source_positions": 40, "max_target_positions": 150, "num_mel_bins": 16},
    ),
}
EACH = [pytest.param(name, marks=pytest.mark.thorough) if name == "mbart" else name for name in MODELS]
"""MBart has the layers of Pegasus and the embeddings of BART."""
LENGTHS = (37, 20, 1)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "torch_armllm: ")  # no call runs module by module
        yield


def build(name: str, **overrides: Any) -> Any:
    """A model whose norms, biases and embeddings are all random."""
    random = torch.Generator().manual_seed(3)
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**options, **overrides})
    kind = "WhisperForConditionalGeneration"
    if family != "Whisper":
        kind = "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration"
    model = getattr(transformers, kind)(config).eval()
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() == 1:
            parameter.copy_(noise * 0.3 + ("weight" in key))
        else:
            parameter.copy_(
                noise * (0.5 if "emb" in key or "shared" in key else parameter[0].numel() ** -0.5)
            )
    model.generation_config.max_length = None
    model.generation_config.do_sample = False
    return model


def inputs_of(model: Any, side: str = "right") -> dict[str, Tensor]:
    """Texts of different lengths, padded on a side; two spectrograms for audio."""
    random = torch.Generator().manual_seed(5)
    if "Whisper" in type(model).__name__:
        return {"input_features": torch.randn(2, 16, 80, generator=random)}
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=random) * mask
    ids += (1 - mask) * model.config.pad_token_id
    return (
        {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
        if side == "left"
        else {
            "input_ids": ids,
            "attention_mask": mask,
        }
    )


def answers(rows: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(9))


def patched(model: Any, quantization: str | None = None, **options: Any) -> Any:
    """Patches a model; both stacks run as native plans."""
    report = torch_armllm.patch(model, quantization, progress=False, **options)
    assert report.captured, report
    forward = patched_forward(model)
    assert forward is not None and isinstance(forward.calls, AttendingCalls)
    assert isinstance(forward.plan, NativePlan)
    encoder = model.get_encoder().forward.calls
    assert not report.notes and isinstance(encoder, (TextCalls, LayerCalls))
    (plan,) = encoder.plans if isinstance(encoder, LayerCalls) else [encoder]
    assert isinstance(plan.plan, NativePlan)
    return model


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-4 of the largest value."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", EACH)
def test_logits_equal_those_of_transformers(name: str) -> None:
    model = build(name)
    sides = ("right",) if name == "whisper" else ("right", "left")
    inputs = [inputs_of(model, side) for side in sides]
    shapes = (1, 70) if name == "whisper" else (1, 2, 70)
    rows = 2 if name == "whisper" else len(LENGTHS)
    expected = [model(**i, decoder_input_ids=answers(rows, n)).logits for i in inputs for n in shapes]
    patched(model)
    found = [model(**i, decoder_input_ids=answers(rows, n)).logits for i in inputs for n in shapes]
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize(
    ("name", "beams"),
    [*((each, 3) for each in MODELS if each != "mbart"), ("bart", 1), ("t5", 1), ("whisper", 1)]
    + [pytest.param("mbart", 3, marks=pytest.mark.thorough)],
)
def test_generated_tokens_equal_those_of_transformers(name: str, beams: int) -> None:
    model = build(name)
    inputs = inputs_of(model)
    arguments: dict[str, Any] = dict(max_new_tokens=40, no_repeat_ngram_size=2, num_beams=beams)
    if name != "whisper":
        arguments["min_new_tokens"] = 30
    expected = model.generate(**inputs, **arguments)
    assert len(set(expected.flatten().tolist())) > 3
    assert torch.equal(patched(model).generate(**inputs, **arguments), expected)


def test_beams_share_their_text() -> None:
    model = patched(build("bart"))
    states = model.get_encoder()(**inputs_of(model))[0].repeat_interleave(2, 0)
    mask = inputs_of(model)["attention_mask"].repeat_interleave(2, 0)
    out = model.get_decoder()(
        answers(6, 3), encoder_hidden_states=states, encoder_attention_mask=mask, use_cache=True
    )
    table = out.past_key_values.cross_attention_cache.encoder.table
    assert torch.equal(table[::2], table[1::2]) and len(set(table[:, 0].tolist())) == 3


def test_long_decodes_cross_blocks_and_reach_the_farthest_bias() -> None:
    model = build("flan-t5")
    inputs = inputs_of(model)
    arguments: dict[str, Any] = dict(max_new_tokens=120, min_new_tokens=120, do_sample=False)
    expected = model.generate(**inputs, **arguments)
    assert torch.equal(patched(model).generate(**inputs, **arguments), expected)


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_quantized_plans_compute_what_quantized_modules_compute(name: str) -> None:
    model = build(name)
    inputs = inputs_of(model)
    ids = answers(len(next(iter(inputs.values()))), 9)
    exact = model(**inputs, decoder_input_ids=ids).logits
    report = torch_armllm.patch(model, progress=False)
    assert report.captured and {layer.scheme for layer in report.quantized} == {"int8"}
    found = model(**inputs, decoder_input_ids=ids).logits
    assert 0 < float((found - exact).norm()) < 0.1 * float(exact.norm())
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for forward in (patched_forward(model), model.get_encoder().forward):
            stack.enter_context(forward.by_modules("a test"))
        expected = model(**inputs, decoder_input_ids=ids).logits
    # a last bit of an activation may round to the neighboring integer
    assert float((found - expected).norm()) < 2e-2 * float(expected.norm())


def test_int4_on_request_and_bfloat16() -> None:
    model = build("bart", d_model=128, encoder_ffn_dim=256, decoder_ffn_dim=256).bfloat16()
    inputs = inputs_of(model)
    expected = model(**inputs, decoder_input_ids=answers(3, 9)).logits.float()
    report = torch_armllm.patch(model, "int4", progress=False)
    assert report.captured and "g32iz" in {layer.scheme for layer in report.quantized}
    found = model(**inputs, decoder_input_ids=answers(3, 9)).logits
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).norm()) < 0.5 * float(expected.norm())


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    model = patched(build("t5"), "int8")
    inputs = inputs_of(model)
    together = model(**inputs, decoder_input_ids=answers(3, 5)).logits
    for row, length in enumerate(LENGTHS):
        alone = model(
            inputs["input_ids"][row : row + 1, :length], decoder_input_ids=answers(3, 5)[row : row + 1]
        ).logits
        assert torch.equal(alone[0], together[row])


def test_caches_grow_in_place_and_choose_rows() -> None:
    model = build("bart")
    inputs, ids = inputs_of(model), answers(3, 8)
    whole = model(**inputs, decoder_input_ids=ids).logits
    patched(model)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    states = model.get_encoder()(**inputs)
    arguments: dict[str, Any] = dict(
        encoder_outputs=states, attention_mask=inputs["attention_mask"], past_key_values=cache
    )
    first = model(decoder_input_ids=ids[:, :5], **arguments)
    assert first.past_key_values is cache and type(cache.cross_attention_cache) is EncoderCache
    assert_near(first.logits, whole[:, :5])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    rows = torch.tensor([2, 0, 0])
    arguments["attention_mask"] = inputs["attention_mask"][rows]
    arguments["encoder_outputs"] = transformers.modeling_outputs.BaseModelOutput(states[0][rows])
    second = model(decoder_input_ids=ids[rows, 5:], **arguments)
    assert_near(second.logits, whole[rows, 5:])
    assert cache.get_seq_length() == 8 and cache.cross_attention_cache.get_seq_length() == max(LENGTHS)


def test_calls_that_a_plan_cannot_serve_run_by_modules() -> None:
    model = build("bart")
    inputs, ids = inputs_of(model), answers(3, 8)
    whole = model(**inputs, decoder_input_ids=ids, output_hidden_states=True)
    patched(model)
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        found = model(**inputs, decoder_input_ids=ids, output_hidden_states=True)
    assert_near(found.decoder_hidden_states[1], whole.decoder_hidden_states[1])
    cache = model(**inputs, decoder_input_ids=ids[:, :5], use_cache=True).past_key_values
    with pytest.warns(UserWarning, match="output_attentions is requested"):
        rest = model(**inputs, decoder_input_ids=ids[:, 5:], past_key_values=cache, output_attentions=True)
    assert_near(rest.logits, whole.logits[:, 5:])
    embedded = model.get_input_embeddings()(ids)
    with pytest.warns(UserWarning, match="inputs_embeds are given"):
        assert_near(model(**inputs, decoder_inputs_embeds=embedded).logits, whole.logits)


def test_losses_are_those_of_the_modules_and_unpatch_restores() -> None:
    model = build("t5")
    inputs, ids = inputs_of(model), answers(3, 8)
    expected = model(**inputs, labels=ids)
    patched(model)
    assert_near(model(**inputs, labels=ids).loss, expected.loss)
    with torch.enable_grad(), pytest.warns(UserWarning, match="labels are given and gradients are enabled"):
        model(**inputs, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is not None
    torch_armllm.unpatch(model)
    assert torch.equal(model(**inputs, labels=ids).logits, expected.logits)


def test_saved_folders_load_patched(tmp_path: Path) -> None:
    model = build("t5")
    inputs, ids = inputs_of(model), answers(3, 8)
    torch_armllm.patch(model, progress=False)
    expected = model(**inputs, decoder_input_ids=ids).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert patched_forward(loaded) is not None
    assert torch.equal(loaded(**inputs, decoder_input_ids=ids).logits, expected)


def test_bad_inputs_have_clear_errors() -> None:
    model = patched(build("bart"))
    inputs = inputs_of(model)
    with pytest.raises(IndexError, match="token ids must be in 0 … 89; the input has 2 … 90"):
        model(**inputs, decoder_input_ids=torch.tensor([[2, 90]] * 3))
    with pytest.raises(ValueError, match="reaches position 150"):
        model(**inputs, decoder_input_ids=answers(3, 151))
    torch_armllm.unpatch(model)
    with pytest.raises(ValueError, match="keeps the keys and values of its encoder in the model's own dtype"):
        torch_armllm.patch(model, kv_cache_dtype="int8")


def test_whisper_transcribes_with_timestamps() -> None:
    model = build("whisper", vocab_size=VOCABULARY)
    features = inputs_of(model)
    config = model.generation_config
    config.no_timestamps_token_id, config.is_multilingual = 40, False
    arguments: dict[str, Any] = dict(return_timestamps=True, max_new_tokens=20, do_sample=False)
    expected = model.generate(**features, **arguments)
    assert torch.equal(patched(model).generate(**features, **arguments), expected)


def test_loaders_of_language_models_refuse_them(tmp_path: Path) -> None:
    build("bart").save_pretrained(tmp_path)
    for load in (torch_armllm.load, lambda path: torch_armllm.LLM(path, skip_tokenizer_init=True)):
        with pytest.raises(ValueError, match="is a bart model of an encoder and a decoder"):
            load(str(tmp_path))
    with pytest.raises(ValueError, match="is a bart model of an encoder and a decoder"):
        quantize_folder(tmp_path, tmp_path / "out", progress=False)


def test_encoder_layerss_record_hidden_states_by_modules() -> None:
    model = build("whisper")
    features = inputs_of(model)["input_features"]
    expected = model.get_encoder()(features, output_hidden_states=True)
    patched(model)
    assert_near(model.get_encoder()(features)[0], expected[0])
    with pytest.warns(UserWarning, match="output_hidden_states is requested"):
        found = model.get_encoder()(features, output_hidden_states=True)
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    with pytest.raises(ValueError, match="length 80, but found 79"):
        model.get_encoder()(features[:, :, 1:])
    assert all("forward" not in vars(layer) for layer in model.get_encoder().layers)


def test_encoders_of_another_kind_keep_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("whisper")
    kind = type(model.get_encoder())
    original = kind.forward

    def forward(self: Any, input_features: Tensor, **kwargs: Any) -> Any:
        out = original(self, input_features, **kwargs)
        out.last_hidden_state = out.last_hidden_state + self.layers[0](out.last_hidden_state, None)
        return out

    monkeypatch.setattr(kind, "forward", forward)
    inputs, ids = inputs_of(model), answers(2, 5)
    expected = model(**inputs, decoder_input_ids=ids).logits
    report = torch_armllm.patch(model, None, progress=False)
    reason = "it does more than to run its layers one after the other"
    assert report.notes == [f"WhisperEncoder runs by its modules: {reason}"]
    assert_near(model(**inputs, decoder_input_ids=ids).logits, expected)


def test_decoders_that_no_plan_computes_run_by_modules() -> None:
    config = transformers.BigBirdPegasusConfig(**STACKS)
    built = transformers.BigBirdPegasusForConditionalGeneration(config).eval()
    ids = answers(2, 9)
    expected = built(input_ids=ids, decoder_input_ids=ids).logits
    report = torch_armllm.patch(built, None, progress=False)
    assert not report.captured and "its tokens attend to later ones" in str(report.capture_reason)
    assert torch.equal(built(input_ids=ids, decoder_input_ids=ids).logits, expected)
    torch_armllm.unpatch(built)
    report = torch_armllm.patch(built, progress=False)
    assert {layer.scheme for layer in report.quantized} == {"int8"}
