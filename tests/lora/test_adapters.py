"""LoRA adapters in the engine: PEFT's logits, mixed batches, the prefix cache, preemption, wrong input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear as PeftLinear
from safetensors.torch import load_file, save_file

import torch_armllm
from tests.support.adapters import ALL, random_adapter
from tests.support.models import tiny
from torch_armllm import LLM, LoRARequest, Recipe, SamplingParams
from torch_armllm.lora.slots import slots_of
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.quant.modules.linear import QuantLinear

PROMPTS = [list(range(5, 45 + number)) for number in range(4)]
KINDS: list[dict[str, Any]] = [
    {"r": 8},
    {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    {"r": 4, "rank_pattern": {"v_proj": 11}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model and three adapters of it."""
    path: Path = tmp_path_factory.mktemp("adapters")
    model = tiny("llama")
    for number, kind in enumerate(KINDS):
        random_adapter(model, path / f"adapter-{number}", number + 1, 1.0, **kind)
    model.save_pretrained(path / "base")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def make(folder: Path, **settings: Any) -> LLM:
    options = {"enable_lora": True, "max_loras": 3, "skip_tokenizer_init": True, "progress": False}
    return LLM(str(folder / "base"), **{**options, **settings})


def request(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number + 1, str(folder / f"adapter-{number}"))


def run(
    llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[LoRARequest | None], **params: Any
) -> list[tuple[list[int], float]]:
    """Returns the tokens of each prompt and the sum of their log-probabilities."""
    sampling = SamplingParams(
        **{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True, "logprobs": 2, **params}
    )
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False, lora_request=list(adapters))
    return [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob or 0.0) for o in outputs]


def peft_logprobs(folder: Path, number: int, tokens: list[int]) -> torch.Tensor:
    """Returns the log-probabilities after each token by PEFT on the same quantized base."""
    base = tiny("llama")
    base.load_state_dict(load_file(folder / "base" / "model.safetensors"), strict=False)
    torch_armllm.quantize(base, Recipe(importance=False), progress=False)
    for module in base.modules():
        if isinstance(module, QuantLinear):
            module.weight = module.weight_packed  # where PEFT looks up the device
    config = LoraConfig.from_pretrained(folder / f"adapter-{number}")
    config._register_custom_module({QuantLinear: PeftLinear})
    adapted = PeftModel.from_pretrained(base, folder / f"adapter-{number}", config=config)
    with torch.no_grad():
        return torch.log_softmax(adapted(input_ids=torch.tensor([tokens])).logits[0].float(), -1)


def logprobs(llm: LLM, adapter: LoRARequest | None, tokens: list[int]) -> torch.Tensor:
    """Returns the engine's log-probabilities after each token except the last."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=97)
    (output,) = llm.generate([tokens], sampling, use_tqdm=False, lora_request=adapter)
    found = output.prompt_logprobs[1:]  # type: ignore[index]
    return torch.tensor([[each[token].logprob for token in range(97)] for each in found])  # type: ignore[index]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_logits_are_those_of_peft_on_the_same_quantized_base(llm: LLM, folder: Path, number: int) -> None:
    tokens = PROMPTS[3]
    expected = peft_logprobs(folder, number, tokens)[:-1]
    off = (logprobs(llm, request(folder, number), tokens) - expected).abs().amax(-1)
    assert off.median() < 1e-5
    assert (off < 1e-3).sum() >= 0.9 * len(off) and off.max() < 0.05  # a few round an activation otherwise


def test_integers_are_close_to_floats(llm: LLM, folder: Path) -> None:
    tokens = PROMPTS[3]
    integers = make(folder, lora_dtype="int8")
    assert {layer.b.dtype for layer in slots_of(integers.model).values()} == {torch.int8}
    expected, base = (logprobs(llm, each, tokens) for each in (request(folder, 0), None))
    found = logprobs(integers, request(folder, 0), tokens)
    assert 0 < (found - expected).norm() < 0.1 * (expected - base).norm()
    together = run(integers, PROMPTS, [None, *(request(folder, number) for number in range(3))])
    assert together[1] == run(integers, PROMPTS[1:2], [request(folder, 0)])[0]


@pytest.mark.parametrize(
    ("dtype", "setting", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.int8),
        (torch.bfloat16, "model", torch.bfloat16),
    ],
)
def test_numbers_of_adapters(dtype: torch.dtype, setting: str, expected: torch.dtype) -> None:
    llm = LLM(tiny("llama", dtype), quantization=Recipe(importance=False), enable_lora=True,
              lora_dtype=setting, skip_tokenizer_init=True, progress=False)  # type: ignore[arg-type]  # fmt: skip
    assert {layer.b.dtype for layer in slots_of(llm.model).values()} == {expected}


def test_unknown_numbers_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="lora_dtype = 'int4': give auto or int8 or model"):
        make(folder, lora_dtype="int4")


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
    expected = [tokens for tokens, _ in run(plain, PROMPTS, [None] * 4)]
    assert [tokens for tokens, _ in run(llm, PROMPTS, [None] * 4)] == expected
    with pytest.raises(ValueError, match="enable_lora"):
        run(plain, PROMPTS[:1], [request(folder, 0)])


def test_prefixes_are_shared_only_with_the_same_adapter(folder: Path) -> None:
    llm = make(folder, max_num_batched_tokens=64)
    expected = run(llm, PROMPTS[:1], [request(folder, 0)])
    cache = llm.llm_engine.scheduler.blocks.prefix_cache
    assert cache is not None and cache.tokens_hit == 0
    run(llm, PROMPTS[:1], [request(folder, 1)])
    run(llm, PROMPTS[:1], [None])
    assert cache.tokens_hit == 0
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == expected
    assert cache.tokens_hit > 0


@pytest.mark.parametrize("swap_space", [0, 1 << 20], ids=["recompute", "swap"])
def test_preempted_sequences_and_forks_keep_their_adapter(llm: LLM, folder: Path, swap_space: int) -> None:
    adapters = [request(folder, number) for number in (0, 1, 2, 0)]
    small = make(folder, max_model_len=256, kv_cache_memory=12 * 32 * 512, swap_space=swap_space)
    expected = run(llm, PROMPTS, adapters, max_tokens=150)
    assert run(small, PROMPTS, adapters, max_tokens=150) == expected
    assert small.stats.totals.preemptions > 0
    outputs = llm.generate(
        PROMPTS[:2],
        SamplingParams(n=3, max_tokens=8, temperature=0.9, seed=1),
        use_tqdm=False,
        lora_request=adapters[:2],
    )
    for prompt, adapter, output in zip(PROMPTS, adapters, outputs, strict=False):
        (alone,) = llm.generate(
            [prompt], SamplingParams(n=3, max_tokens=8, temperature=0.9, seed=1), use_tqdm=False,
            lora_request=adapter,
        )  # fmt: skip
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in output.outputs]


def test_draft_tokens_are_verified_with_the_adapter(llm: LLM, folder: Path) -> None:
    drafting = make(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    adapters = [request(folder, number) for number in (0, 1, 2, 0)]
    found = run(drafting, PROMPTS, adapters, max_tokens=40)
    assert found == run(llm, PROMPTS, adapters, max_tokens=40)


def test_least_recently_used_adapters_make_room(folder: Path) -> None:
    llm = make(folder, max_loras=2)
    first = run(llm, PROMPTS[:1], [request(folder, 0)])
    for number in (1, 2):
        run(llm, PROMPTS[:1], [request(folder, number)])
    assert [r.lora_name for r in llm.llm_engine.list_loras()] == ["adapter-1", "adapter-2"]
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == first
    with pytest.raises(ValueError, match="raise max_loras"):
        run(llm, PROMPTS[:3], [request(folder, number) for number in range(3)])
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == first
    with pytest.raises(ValueError, match="no adapter has the id 9"):
        llm.llm_engine.remove_lora(9)
    llm.llm_engine.remove_lora(1)
    with pytest.raises(ValueError, match="another id"):
        run(llm, PROMPTS[:1], [LoRARequest("other", 2, "elsewhere")])


def damaged(folder: Path, path: Path, config: dict[str, Any], weights: Any = None) -> LoRARequest:
    """Returns a copy of the first adapter with other settings, and tensors that a function has changed."""
    shutil.copytree(folder / "adapter-0", path)
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    if weights is not None:
        tensors = load_file(path / "adapter_model.safetensors")
        weights(tensors)
        save_file(tensors, path / "adapter_model.safetensors")
    return LoRARequest("damaged", 9, str(path))


def check_refused(llm: LLM, folder: Path, target: Path, wrong: tuple[dict[str, Any], Any, str]) -> None:
    """Checks that an engine refuses a damaged adapter with a message, and serves the right one as before."""
    config, weights, message = wrong
    good = run(llm, PROMPTS[:1], [request(folder, 0)])
    adapter = damaged(folder, target, config, weights)
    with pytest.raises(ValueError, match=message):
        run(llm, PROMPTS[:1], [adapter])
    assert run(llm, PROMPTS[:1], [request(folder, 0)]) == good


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "dora": ({"use_dora": True}, None, "use_dora"),
    "bias": ({"bias": "all"}, None, "bias"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, None, "changed the base weight"),
    "pattern": ({"rank_pattern": ["q_proj"]}, None, "must be an object"),
    "expression": ({"rank_pattern": {"q_proj(": 2}}, None, "pattern 'q_proj"),
    "integers": ({}, lambda t: t.update({QUERY + "A.weight": torch.ones(8, 64, dtype=torch.int8)}), "floats"),
    "saved": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
    "type": ({"peft_type": "IA3"}, None, "IA3"),
    "rank-0": ({"r": 0}, None, "rank 0"),
    "rank": ({"r": 4}, None, "at rank 4"),
    "alpha": ({"lora_alpha": "two"}, None, "lora_alpha"),
    "nan": ({}, lambda t: t[QUERY + "A.weight"].fill_(float("nan")), "not finite"),
    "inf": ({}, lambda t: t[QUERY + "B.weight"].fill_(float("inf")), "not finite"),
    "one": ({}, lambda t: t.pop(QUERY + "A.weight"), "lora_B alone"),
    "name": ({}, lambda t: t.update(x=torch.ones(1)), "tensor 'x'"),
    "module": (
        {},
        lambda t: t.update({"base_model.model.score.lora_A.weight": torch.ones(8, 64),
                            "base_model.model.score.lora_B.weight": torch.ones(97, 8)}),
        "score, which is no quantized",
    ),
    "shape": ({}, lambda t: t.update({QUERY + "A.weight": torch.ones(8, 65)}), "another model"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_adapters_are_refused_and_nothing_is_lost(
    llm: LLM, folder: Path, tmp_path: Path, name: str
) -> None:
    check_refused(llm, folder, tmp_path / "adapter", WRONG[name])


def test_files_and_ranks_are_checked(llm: LLM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        run(llm, PROMPTS[:1], [LoRARequest("none", 9, str(tmp_path / "none"))])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    with pytest.raises(ValueError, match="safe_serialization"):
        run(llm, PROMPTS[:1], [LoRARequest("empty", 9, str(tmp_path / "empty"))])
    (tmp_path / "empty" / "adapter_model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="damaged"):
        run(llm, PROMPTS[:1], [LoRARequest("empty", 9, str(tmp_path / "empty"))])
    high = random_adapter(tiny("llama"), tmp_path / "high", 1, r=17)
    with pytest.raises(ValueError, match="max_lora_rank is 16"):
        run(llm, PROMPTS[:1], [LoRARequest("high", 9, str(high))])
    with pytest.raises(ValueError, match="above 0"):
        LoRARequest("zero", 0, "path")


def test_patched_models_get_slots_unless_their_channels_are_scaled(folder: Path) -> None:
    model = tiny("llama")
    torch_armllm.patch(model, progress=False)
    with pytest.raises(ValueError, match="scaled this model's channels"):
        LLM(model, enable_lora=True, skip_tokenizer_init=True)
    again = tiny("llama")
    again.load_state_dict(load_file(folder / "base" / "model.safetensors"), strict=False)
    torch_armllm.patch(again, Recipe(importance=False), progress=False)
    late = LLM(again, enable_lora=True, skip_tokenizer_init=True)
    expected = run(make(folder), PROMPTS[:1], [request(folder, 0)])
    assert run(late, PROMPTS[:1], [request(folder, 0)]) == expected
    # a second engine on one model has slots of its own
    second = LLM(again, enable_lora=True, max_loras=2, skip_tokenizer_init=True)
    other = run(second, PROMPTS[:1], [request(folder, 1)])
    assert run(late, PROMPTS[:1], [request(folder, 0)]) == expected != other
    assert run(second, PROMPTS[:1], [request(folder, 1)]) == other
    with pytest.raises(ValueError, match="load the model once more"):
        LLM(again, skip_tokenizer_init=True)


def test_rows_have_no_adapter_between_steps(llm: LLM, folder: Path) -> None:
    layers = slots_of(llm.model)
    assert {name.rsplit(".", 1)[-1] for name in layers} == {*ALL, "embed_tokens", "lm_head"}
    run(llm, PROMPTS, [None, request(folder, 0), None, request(folder, 1)])
    rows = layers["model.layers.0.self_attn.q_proj"].adapters
    of_logits = layers.pop("lm_head").adapters
    assert bool((rows == -1).all()) and all(layer.adapters is rows for layer in layers.values())
    assert bool((of_logits == -1).all()) and of_logits is not rows


def test_layers_that_the_plan_does_not_compute_are_refused(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3", torch.float32, vocab_size=97, pad_token_id=0)
    adapters = [
        random_adapter(model, tmp_path / name, 1, 1.0, target_modules=[name])
        for name in ("kv_b_proj", "o_proj")
    ]
    llm = LLM(model, quantization=Recipe(importance=False), enable_lora=True, skip_tokenizer_init=True)
    base = run(llm, PROMPTS[:1], [None])
    with pytest.raises(
        ValueError, match="kv_b_proj, which is no quantized linear layer of this model's plan"
    ):
        run(llm, PROMPTS[:1], [LoRARequest("latents", 1, str(adapters[0]))])
    assert run(llm, PROMPTS[:1], [LoRARequest("output", 2, str(adapters[1]))]) != base
