"""LoRA adapters of experts: PEFT's deltas on the same quantized base, mixed batches, wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.lora.test_adapters import PROMPTS, check_refused, damaged, logprobs, make, request, run
from tests.support.adapters import random_adapter
from tests.support.models import tiny
from torch_armllm import LLM, LoRARequest, Recipe
from torch_armllm.hf.expert_layout import ExpertLayout
from torch_armllm.lora import adapter_table
from torch_armllm.lora.slots import slots_of
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.ops.activation import FUNCTIONS
from torch_armllm.ops.linear import int4_linear
from torch_armllm.quant.modules.experts import QuantExperts

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: list[dict[str, Any]] = [
    {"target_parameters": BOTH},
    {"target_parameters": BOTH[1:], "r": 5, "lora_alpha": 7, "use_rslora": True},
    {"target_parameters": BOTH, "r": 4, "rank_pattern": {"experts.down_proj": 11},
     "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 3}},
]  # fmt: skip
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]


def saved(path: Path, family: str, kinds: list[dict[str, Any]] = KINDS) -> Path:
    model = tiny(family)
    for number, kind in enumerate(kinds):
        random_adapter(model, path / f"adapter-{number}", number + 1, 1.0, target_modules=[], **kind)
    model.save_pretrained(path / "base")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model and three adapters of it."""
    return saved(tmp_path_factory.mktemp("adapters"), "qwen3_moe")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


class AdaptedExperts(nn.Module):
    """Quantized experts whose products have dense deltas added, one expert after the other.

    Args:
        experts: the quantized ones.
        inner: added to gate and up, ``(E, H, 2 · I)`` in the order of the parameter, or to up alone; None:
            nothing is.
        outer: added to down, ``(E, I, H)``.
    """

    def __init__(self, experts: QuantExperts, inner: Tensor | None, outer: Tensor | None) -> None:
        super().__init__()
        self.experts, self.outer = experts, outer
        layout = experts.layout or ExpertLayout(False, False, False, experts.activation)
        self.inner: list[Tensor] | None = None
        self.sides = 2 if experts.gated else 1
        if inner is not None and layout.interleaved:
            self.inner = [inner[..., 0::2], inner[..., 1::2]]
        elif inner is not None:
            self.inner = list(inner[: experts.num_experts].chunk(self.sides, -1))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        e, out = self.experts, torch.zeros_like(x)
        for expert in range(e.num_experts):
            token, choice = torch.where(ids == expert)
            sides = []
            for side in range(self.sides):
                bias = None if e.gate_up_bias is None else e.gate_up_bias[expert, side]
                packed = e.gate_up_packed[expert, side :: self.sides].contiguous()
                value = int4_linear(x[token], packed, e.intermediate_dim, e.scheme, bias, rotated=e.rotated)
                sides.append(value if self.inner is None else value + x[token] @ self.inner[side][expert])
            middle = FUNCTIONS[e.activation](sides[0], sides[-1], e.limit, e.up_limit)
            bias = None if e.down_bias is None else e.down_bias[expert]
            value = int4_linear(
                middle, e.down_packed[expert], e.hidden_dim, e.scheme, bias, rotated=e.rotated
            )
            if self.outer is not None:
                value = value + middle @ self.outer[expert]
            out.index_add_(0, token, value * weights[token, choice, None])
        identical = weights.masked_fill(ids < e.num_experts, 0.0).sum(-1, keepdim=True)
        return out + x * identical


def deltas(adapted: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Returns what PEFT adds to parameters, ``(E, in, out)``, by the names of their modules."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, wrapper in adapted.named_modules():
        if isinstance(wrapper, ParamWrapper):
            module = name.removeprefix("base_model.model.").replace(".base_layer", "")
            delta = wrapper.get_delta_weight("default").detach()
            transposed = getattr(wrapper.get_base_layer(), "is_transposed", False)
            found.setdefault(module, {})[wrapper.parameter_name] = delta if transposed else delta.mT
    return found


def expected_logprobs(folder: Path, added: dict[str, dict[str, Tensor]], tokens: list[int]) -> Tensor:
    """Returns the log-probabilities after each token by the quantized base with deltas added to experts."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    torch_armllm.quantize(base, Recipe(importance=False), progress=False)
    for name, of_module in added.items():
        experts = base.get_submodule(name)
        assert isinstance(experts, QuantExperts)
        inner = of_module.get("gate_up_proj", of_module.get("up_proj"))
        changed = AdaptedExperts(experts, inner, of_module.get("down_proj"))
        base.set_submodule(name, changed)
    with torch.no_grad():
        return torch.log_softmax(base(input_ids=torch.tensor([tokens])).logits[0].float(), -1)


def peft_logprobs(folder: Path, number: int, tokens: list[int]) -> Tensor:
    """Returns the log-probabilities after each token by PEFT's deltas on the same quantized base."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    config = LoraConfig.from_pretrained(folder / f"adapter-{number}")
    adapted = PeftModel.from_pretrained(model, folder / f"adapter-{number}", config=config)
    added = deltas(adapted)
    assert added
    return expected_logprobs(folder, added, tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_peft_on_the_same_quantized_base(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family)
    llm, tokens = make(folder), PROMPTS[3]
    for number in range(len(KINDS)):
        expected = peft_logprobs(folder, number, tokens)[:-1]
        error = (logprobs(llm, request(folder, number), tokens) - expected).abs()
        # a sum that is rounded elsewhere can move an INT8 step, and with it a few rows
        assert error.quantile(0.7) < 1e-4 and error.max() < (1e-3 if family == "qwen3_moe" else 0.1)
        assert (expected - logprobs(llm, None, tokens)).abs().median() > 0.1


@pytest.mark.parametrize("family", ["nemotron_h", "longcat_flash"])
def test_experts_without_a_gate_and_those_that_return_tokens(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_model(family, torch.float32, vocab_size=97, pad_token_id=0)
    inner = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    kind = {"target_modules": [], "target_parameters": [f"experts.{inner}", "experts.down_proj"]}
    adapter = random_adapter(model, tmp_path / "adapter-0", 1, 1.0, **kind)
    model.save_pretrained(tmp_path / "base")
    llm = LLM(str(tmp_path / "base"), enable_lora=True, skip_tokenizer_init=True, progress=False)
    expected = peft_logprobs(tmp_path, 0, PROMPTS[3])[:-1]
    found = logprobs(llm, LoRARequest("experts", 1, str(adapter)), PROMPTS[3])
    error = (found - expected).abs()
    # plans of latent attention round keys once more, but the first token sees itself alone
    assert error[0].max() < 1e-3 and error.quantile(0.7) < (1e-3 if family == "nemotron_h" else 0.1)
    assert (expected - logprobs(llm, None, PROMPTS[3])).abs().median() > 0.02


def test_rows_of_a_batch_have_the_bits_of_rows_alone(llm: LLM, folder: Path) -> None:
    adapters = [None, *(request(folder, number) for number in range(3))]
    together = run(llm, PROMPTS, adapters)
    assert len({tuple(tokens) for tokens, _ in run(llm, PROMPTS[:1] * 4, adapters)}) == 4
    for prompt, adapter, expected in zip(PROMPTS, adapters, together, strict=True):
        assert run(llm, [prompt], [adapter]) == [expected]


def test_no_adapter_is_the_model_alone(llm: LLM, folder: Path) -> None:
    plain = LLM(
        str(folder / "base"), quantization=Recipe(importance=False), skip_tokenizer_init=True, progress=False
    )
    assert run(llm, PROMPTS, [None] * 4) == run(plain, PROMPTS, [None] * 4)


def test_integers_are_close_to_floats(llm: LLM, folder: Path) -> None:
    tokens, integers = PROMPTS[3], make(folder, lora_dtype="int8")
    experts = slots_of(integers.model)["model.layers.0.mlp.experts"]
    assert experts.kind == "experts" and experts.factors.inner_a.dtype == torch.int8
    expected, base = (logprobs(llm, each, tokens) for each in (request(folder, 0), None))
    found = logprobs(integers, request(folder, 0), tokens)
    assert 0 < (found - expected).norm() < 0.2 * (expected - base).norm()


def test_prefixes_and_slots_are_those_of_the_adapter(folder: Path) -> None:
    llm = make(folder, max_loras=2, max_num_batched_tokens=64)
    expected = run(llm, PROMPTS[:1], [request(folder, 0)])
    cache = llm.llm_engine.scheduler.blocks.prefix_cache
    assert cache is not None
    for number in (1, 2):  # the last takes the slot of the first
        run(llm, PROMPTS[:1], [request(folder, number)])
    run(llm, PROMPTS[:1], [None])
    assert cache.tokens_hit == 0
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == expected
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == expected
    assert cache.tokens_hit > 0
    drafting = make(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert run(drafting, PROMPTS[:1], [request(folder, 0)]) == expected


def test_slots_take_memory_with_the_first_adapter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(folder, max_loras=2)
    expected = run(llm, PROMPTS[:1], [request(folder, 0)])
    monkeypatch.setattr(adapter_table, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="adapts experts, which takes 0 MB; 0 MB are free: lower kv_cache"):
        run(llm, PROMPTS[:1], [request(folder, 1)])
    assert [each.lora_name for each in llm.llm_engine.list_loras()] == ["adapter-0"]
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == expected
    llm.llm_engine.remove_lora(1)
    run(llm, PROMPTS[:1], [request(folder, 1)])  # in the slot that has memory


def test_adapters_of_single_experts(folder: Path, tmp_path: Path) -> None:
    """Adapters that are older than transformers' stacked experts name the linear layers of each."""
    torch.manual_seed(5)
    tensors: dict[str, Tensor] = {}
    added = {}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        inner, outer = torch.zeros(8, 64, 96), torch.zeros(8, 48, 64)
        for expert in range(8):
            for product, (inputs, outputs) in {"gate_proj": (64, 48), "up_proj": (64, 48),
                                               "down_proj": (48, 64)}.items():  # fmt: skip
                if (expert + len(product)) % 3 == 0:
                    continue
                a, b = torch.randn(4, inputs) / inputs**0.5, torch.randn(outputs, 4) / 2
                key = f"base_model.model.{name}.{expert}.{product}.lora_"
                tensors |= {key + "A.weight": a, key + "B.weight": b}
                delta = 2 * (b @ a).T
                if product == "down_proj":
                    outer[expert] = delta
                else:
                    inner[expert, :, 48 * (product == "up_proj") :][:, :48] = delta
        added[name] = {"gate_up_proj": inner, "down_proj": outer}
    old = damaged(folder, tmp_path / "old", {"r": 4, "lora_alpha": 8, "target_parameters": None})
    save_file(tensors, Path(old.lora_path) / "adapter_model.safetensors")
    llm, tokens = make(folder), PROMPTS[3]
    error = (logprobs(llm, old, tokens) - expected_logprobs(folder, added, tokens)[:-1]).abs()
    assert error.median() < 1e-4 and error.max() < 0.1
    with pytest.raises(ValueError, match="with rank 8, where gate and up"):
        run(make(folder, max_lora_rank=7), PROMPTS[:1], [old])


DOWN = "base_model.model.model.layers.0.mlp.experts.lora_"
INNER = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_"
SINGLE = "base_model.model.model.layers.0.mlp.experts.8.up_proj.lora_"
WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "rank-0": ({"r": 0}, None, "rank 0"),
    "rank": ({"r": 4}, None, "at rank 4"),
    "high": ({"r": 16}, None, "at rank 16"),
    "nan": ({}, lambda t: t[INNER + "A.weight"].fill_(float("nan")), "not finite"),
    "scale": ({"lora_alpha": 1e38}, lambda t: t[DOWN + "B.weight"].fill_(1e3), "not finite"),
    "one": ({}, lambda t: t.pop(DOWN + "A.weight"), "lora_B alone"),
    "inputs": ({}, lambda t: t.update({DOWN + "A.weight": torch.ones(64, 49)}), "another model"),
    "outputs": ({}, lambda t: t.update({INNER + "B.weight": torch.ones(95, 64)}), "another model"),
    "experts": (
        {},
        lambda t: t.update({DOWN + "A.weight": torch.ones(72, 48), DOWN + "B.weight": torch.ones(64, 72)}),
        "model has 8 experts",
    ),
    "integers": ({}, lambda t: t.update({DOWN + "A.weight": torch.ones(64, 48, dtype=torch.int8)}), "floats"),
    "vector": ({}, lambda t: t.update({DOWN + "A.weight": torch.ones(64)}), "must be matrices"),
    "module": (
        {"target_parameters": [*BOTH, "router.experts"]},
        lambda t: t.update({"base_model.model.router.lora_A.weight": torch.ones(64, 48),
                            "base_model.model.router.lora_B.weight": torch.ones(64, 64)}),
        "router, which has no quantized experts",
    ),
    "expert": (
        {},
        lambda t: t.update({SINGLE + "A.weight": torch.ones(8, 64), SINGLE + "B.weight": torch.ones(48, 8)}),
        "of expert 8; this model has 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_adapters_are_refused_and_nothing_is_lost(
    llm: LLM, folder: Path, tmp_path: Path, name: str
) -> None:
    check_refused(llm, folder, tmp_path / "adapter", WRONG[name])
