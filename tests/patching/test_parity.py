"""Parity of patched models: floats with the original model, INT4 with a plain-PyTorch emulation."""

from __future__ import annotations

import pytest
import torch

import torch_armllm
from tests.support.models import tiny, token_ids
from tests.support.patched_models import FAMILIES, chunked, close, close_quantized, patched
from tests.support.reference_modules import emulate
from torch_armllm.ops import variants
from torch_armllm.plan.native import NativePlan
from torch_armllm.quant.inplace import quantize

BFLOAT16 = [("llama", torch.bfloat16), ("qwen3_moe", torch.bfloat16)]
"""Dense layers; norms of heads and a router: what is cast in other families is cast in these."""


@pytest.mark.parametrize(("family", "dtype"), [*((f, torch.float32) for f in FAMILIES), *BFLOAT16], ids=str)
def test_unquantized_logits_equal_the_models(family: str, dtype: torch.dtype) -> None:
    ids = token_ids(1, 41)
    with torch.no_grad():
        expected = tiny(family, dtype)(ids).logits
    model = patched(family, dtype, None)
    with torch.no_grad():
        close(model(ids).logits, expected, dtype)
    close(chunked(model, ids, [17, 9, 15]), expected, dtype)
    close(chunked(model, ids, [36, 1, 1, 1, 1, 1]), expected, dtype)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text", "gpt2", "phi3", "gpt_oss"])
def test_other_families_match(family: str) -> None:
    ids = token_ids(1, 41)  # longer than the sliding windows
    with torch.no_grad():
        expected = tiny(family)(ids).logits
    close(chunked(patched(family, quantization=None), ids, [30, 10, 1]), expected, torch.float32)


def test_tied_embeddings_run_natively_from_the_head_weights() -> None:
    model, ids = tiny("llama", torch.bfloat16, tie_word_embeddings=True), token_ids(1, 23)
    twin = tiny("llama", torch.bfloat16, tie_word_embeddings=True)
    quantize(twin, progress=False)
    report = torch_armllm.patch(model, progress=False)
    assert report.ops["split_embedding"] == 1
    assert isinstance(model.base_model.forward.plan, NativePlan)
    with torch.no_grad():
        close_quantized(model(ids).logits, emulate(twin)(ids).logits, torch.bfloat16)
        plain = tiny("llama", torch.bfloat16, tie_word_embeddings=True)
        torch_armllm.patch(plain, keep_original=True, progress=False)
        close_quantized(model(ids).logits, plain(ids).logits, torch.bfloat16)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_quantized_steps_run_natively_and_are_deterministic(family: str) -> None:
    model = patched(family)
    assert isinstance(model.base_model.forward.plan, NativePlan)
    ids = token_ids(1, 41)
    with torch.no_grad():
        whole = model(ids).logits
    assert torch.equal(chunked(model, ids, [17, 9, 15]), whole)
    assert torch.equal(chunked(model, ids, [36, 1, 1, 1, 1, 1]), whole)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_row_is_bit_equal_in_any_batch(family: str) -> None:
    model = patched(family)
    ids = token_ids(3, 19)
    with torch.no_grad():
        together = model(ids).logits
        for row in range(3):
            assert torch.equal(model(ids[row : row + 1]).logits[0], together[row])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((f, torch.float32) for f in (*FAMILIES, "gpt_oss")), *BFLOAT16, ("gpt_oss", torch.bfloat16)],
    ids=str,
)
def test_quantized_logits_match_the_emulation(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype)
    quantize(model, progress=False)
    ids = token_ids(1, 23)
    with torch.no_grad():
        expected = emulate(model)(ids).logits
        close_quantized(patched(family, dtype)(ids).logits, expected, dtype)


@pytest.mark.parametrize("scheme", ["row", "g32"])
def test_other_schemes_match_their_emulation(scheme: str) -> None:
    model = tiny("mixtral")
    quantize(model, scheme, progress=False)
    ids = token_ids(1, 8)  # more tokens go through folded group scales in g32, which the emulation has not
    with torch.no_grad():
        expected = emulate(model)(ids).logits
        got = patched("mixtral", quantization=scheme)(ids).logits
    if scheme == "row":
        close_quantized(got, expected, torch.float32)
        return
    # the emulation adds the groups' float sums in another order: an activation may round differently
    difference = (got - expected).abs().amax(-1).flatten() / expected.abs().max()
    assert int((difference < 1e-5).sum()) >= 6
    assert float(difference.max()) < 0.02


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_all_variants_are_bit_equal(family: str) -> None:
    ids = token_ids(2, 13)
    logits = []
    for name in variants.machine().runnable:
        with variants.use(name), torch.no_grad():
            logits.append(patched(family)(ids).logits)
    for other in logits[1:]:
        assert torch.equal(other, logits[0])


def test_all_thread_counts_are_bit_equal() -> None:
    ids, before = token_ids(2, 33), torch.get_num_threads()
    logits = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                logits.append(patched("qwen3_moe")(ids).logits)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
