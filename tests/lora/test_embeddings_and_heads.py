"""LoRA adapters of embeddings and heads: PEFT's logits, mixed batches, fused heads, wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Embedding as PeftEmbedding
from peft.tuners.lora import Linear as PeftLinear
from safetensors.torch import load_file

import torch_armllm
from tests.lora.test_adapters import PROMPTS, check_refused, damaged, logprobs, make, request, run
from tests.support.adapters import random_adapter
from tests.support.models import tiny
from torch_armllm import LLM, LoRARequest, Recipe, SamplingParams
from torch_armllm.lora.slots import slots_of
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.picture_inputs import with_given_rows
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.modules.tied_embedding import TiedEmbedding

KINDS: list[dict[str, Any]] = [
    {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    {"target_modules": ["embed_tokens"], "r": 5, "lora_alpha": 7, "use_rslora": True},
    {"target_modules": ["lm_head"], "r": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model and three adapters of it."""
    return saved(tmp_path_factory.mktemp("adapters"), "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def saved(path: Path, family: str, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    model = tiny(family, dtype, **config)
    for number, kind in enumerate(KINDS):
        random_adapter(model, path / f"adapter-{number}", number + 1, 1.0, **kind)
    model.save_pretrained(path / "base")
    return path


def peft_logprobs(folder: Path, number: int, tokens: list[int]) -> torch.Tensor:
    """Returns the log-probabilities after each token by PEFT on the same quantized base."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    torch_armllm.quantize(base, Recipe(importance=False), progress=False)
    for module in base.modules():
        if isinstance(module, QuantLinear | TiedEmbedding):
            module.weight = module.weight_packed  # where PEFT looks up the device
        if isinstance(module, TiedEmbedding):
            module.in_features, module.out_features = module.num_embeddings, module.embedding_dim
            module.max_norm, module.norm_type, module.sparse = None, 2.0, False
            module.scale_grad_by_freq = False
    config = LoraConfig.from_pretrained(folder / f"adapter-{number}")
    config._register_custom_module({QuantLinear: PeftLinear, TiedEmbedding: PeftEmbedding})
    config.target_modules = set(config.target_modules or ())
    adapted = PeftModel.from_pretrained(base, folder / f"adapter-{number}", config=config)
    with torch.no_grad():
        return torch.log_softmax(adapted(input_ids=torch.tensor([tokens])).logits[0].float(), -1)


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_logits_are_those_of_peft_on_the_same_quantized_base(llm: LLM, folder: Path, number: int) -> None:
    tokens = PROMPTS[3]
    expected = peft_logprobs(folder, number, tokens)[:-1]
    assert (logprobs(llm, request(folder, number), tokens) - expected).abs().max() < 1e-3


def test_embeddings_that_are_scaled(tmp_path: Path) -> None:
    folder = saved(tmp_path, "gemma3_text")
    llm, tokens = make(folder), PROMPTS[3]
    for number in range(2):
        expected = peft_logprobs(folder, number, tokens)[:-1]
        assert (logprobs(llm, request(folder, number), tokens) - expected).abs().max() < 1e-3


def test_embeddings_that_share_the_head_s_integers(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", torch.bfloat16, tie_word_embeddings=True)
    llm, tokens = make(folder, lora_dtype="model"), PROMPTS[3]
    assert isinstance(llm.model.get_input_embeddings(), TiedEmbedding)
    base = logprobs(llm, None, tokens)
    for number in range(len(KINDS)):
        expected = peft_logprobs(folder, number, tokens)[:-1]
        found = logprobs(llm, request(folder, number), tokens)
        assert (found - expected).norm() < 0.05 * (expected - base).norm()


def test_integers_are_close_to_floats(llm: LLM, folder: Path) -> None:
    tokens = PROMPTS[3]
    integers = make(folder, lora_dtype="int8")
    slots = slots_of(integers.model)
    assert slots["lm_head"].a.dtype == slots["model.embed_tokens"].b.dtype == torch.int8
    assert slots["model.embed_tokens"].a.dtype == torch.float32  # rows of it are looked up, not summed
    for number in range(len(KINDS)):
        expected, base = (logprobs(llm, each, tokens) for each in (request(folder, number), None))
        found = logprobs(integers, request(folder, number), tokens)
        assert 0 < (found - expected).norm() < 0.1 * (expected - base).norm()


def test_rows_of_a_batch_have_the_bits_of_rows_alone(llm: LLM, folder: Path) -> None:
    adapters = [None, *(request(folder, number) for number in range(3))]
    together = run(llm, PROMPTS, adapters)
    assert len({tuple(tokens) for tokens, _ in run(llm, PROMPTS[:1] * 4, adapters)}) == 4
    for prompt, adapter, expected in zip(PROMPTS, adapters, together, strict=True):
        assert run(llm, [prompt], [adapter]) == [expected]
    # without log-probabilities the head is part of the plan, and with drafts a sequence has several rows
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    drafting = make(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    for each in (llm, drafting):
        outputs = each.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [tokens for tokens, _ in together]


def test_rows_of_logits_are_not_those_of_tokens(llm: LLM, folder: Path) -> None:
    """Prompts have one row of logits, or all; whichever is last in a batch has another place in each list."""
    (expected,) = (logprobs(llm, request(folder, 2), PROMPTS[2]),)
    whole = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=97)
    one = SamplingParams(max_tokens=1, temperature=0.0)
    adapters = [request(folder, 0), None, request(folder, 2)]
    outputs = llm.generate(PROMPTS[:3], [one, one, whole], use_tqdm=False, lora_request=adapters)
    found = outputs[2].prompt_logprobs[1:]  # type: ignore[index]
    rows = [[each[token].logprob for token in range(97)] for each in found]  # type: ignore[index]
    assert torch.equal(torch.tensor(rows), expected)
    slots = slots_of(llm.model)
    assert slots["lm_head"].adapters is not slots["model.embed_tokens"].adapters
    assert all(bool((layer.adapters == -1).all()) for layer in slots.values())


def test_prefixes_are_shared_only_with_the_same_adapter(folder: Path) -> None:
    llm = make(folder, max_num_batched_tokens=64)
    expected = run(llm, PROMPTS[:1], [request(folder, 1)])
    cache = llm.llm_engine.scheduler.blocks.prefix_cache
    assert cache is not None
    run(llm, PROMPTS[:1], [None])
    assert cache.tokens_hit == 0
    assert run(llm, PROMPTS[:1], [request(folder, 1)]) == expected
    assert cache.tokens_hit > 0


@pytest.mark.parametrize(("family", "scale"), [("llama", 1.0), ("gemma3_text", 8.0)])
def test_tokens_of_pictures_have_no_adapter(family: str, scale: float) -> None:
    """Their embeddings take the place of those that adapters were added to."""
    llm = LLM(tiny(family), quantization=Recipe(importance=False), enable_lora=True, skip_tokenizer_init=True,
              progress=False)  # fmt: skip
    plan = llm.llm_engine.runner.plan
    assert isinstance(plan, NativePlan)
    before = plan.program.opcodes
    at = before.index("lora_embed") + 1
    changed = with_given_rows(plan.program, 64, torch.float32, 8, scale=scale)
    assert changed.opcodes == [*before[:at], "add", *before[at:]]


EMBEDDING = "base_model.model.model.embed_tokens."
HEAD = "base_model.model.lm_head."
WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "rank-0": ({"r": 0}, None, "rank 0"),
    "nan": ({}, lambda t: t[EMBEDDING + "lora_embedding_A"].fill_(float("nan")), "not finite"),
    "tokens": ({}, lambda t: t.update({EMBEDDING + "lora_embedding_A": torch.ones(8, 98)}), "another model"),
    "logits": ({}, lambda t: t.update({HEAD + "lora_B.weight": torch.ones(98, 8)}), "another model"),
    "one": ({}, lambda t: t.pop(EMBEDDING + "lora_embedding_B"), "lora_A alone"),
    "linear": (
        {},
        lambda t: t.update(
            {EMBEDDING + f"lora_{factor}.weight": t.pop(EMBEDDING + f"lora_embedding_{factor}")
             for factor in "AB"}
        ),
        "embed_tokens, which is no quantized linear layer",
    ),
    "embedding": (
        {},
        lambda t: t.update(
            {HEAD + f"lora_embedding_{factor}": t.pop(HEAD + f"lora_{factor}.weight") for factor in "AB"}
        ),
        "lm_head, which is no embedding",
    ),
    "copy": ({}, lambda t: t[HEAD + "base_layer.weight"][96].add_(0.01), "brings a weight"),
    "copied-table": ({}, lambda t: t[EMBEDDING + "base_layer.weight"].mul_(1.1), "brings a weight"),
    "more-tokens": (
        {},
        lambda t: t.update({EMBEDDING + "base_layer.weight": torch.ones(98, 64)}),
        "brings a weight",
    ),
    "only-copy": (
        {},
        lambda t: [t.pop(HEAD + f"lora_{factor}.weight") for factor in "AB"],
        "does not adapt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_adapters_are_refused_and_nothing_is_lost(
    llm: LLM, folder: Path, tmp_path: Path, name: str
) -> None:
    check_refused(llm, folder, tmp_path / "adapter", WRONG[name])


def test_copies_of_the_base_are_no_change(llm: LLM, folder: Path, tmp_path: Path) -> None:
    path = folder / "adapter-0" / "adapter_model.safetensors"
    assert EMBEDDING + "base_layer.weight" in load_file(path)

    def without(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[EMBEDDING + "base_layer.weight"], tensors[HEAD + "base_layer.weight"]

    plain = damaged(folder, tmp_path / "adapter", {}, without)
    assert run(llm, PROMPTS[:1], [plain]) == run(llm, PROMPTS[:1], [request(folder, 0)])


def test_a_float_head_has_no_slots(tmp_path: Path) -> None:
    model = tiny("llama")
    adapter = random_adapter(model, tmp_path / "adapter", 1, 1.0, target_modules=["lm_head"])
    llm = LLM(model, quantization=Recipe(importance=False, ignore=("lm_head",)), enable_lora=True,
              skip_tokenizer_init=True, progress=False)  # fmt: skip
    with pytest.raises(ValueError, match="lm_head, which is no quantized linear layer"):
        run(llm, PROMPTS[:1], [LoRARequest("head", 1, str(adapter))])


def test_other_embeddings_are_refused(tmp_path: Path) -> None:
    model = tiny("gpt2")
    adapters = [
        random_adapter(model, tmp_path / name, 1, 1.0, target_modules=[name]) for name in ("wte", "wpe")
    ]
    llm = LLM(model, quantization=Recipe(importance=False), enable_lora=True, skip_tokenizer_init=True,
              progress=False)  # fmt: skip
    base = run(llm, PROMPTS[:1], [None])
    assert run(llm, PROMPTS[:1], [LoRARequest("tokens", 1, str(adapters[0]))]) != base
    with pytest.raises(ValueError, match="wpe, which is no embedding of tokens"):
        run(llm, PROMPTS[:1], [LoRARequest("positions", 2, str(adapters[1]))])
