"""Models with layers of two INT8 digits per activation: passes, plans, fused norms, heads, saved folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import torch_armllm
from tests.llm.test_llm import tokenizer
from tests.support.engines import drain, plan_runner, submit
from tests.support.models import tiny, token_ids
from tests.support.packed_weights import error
from torch_armllm import LLM, Recipe, SamplingParams
from torch_armllm.engine.build import build_engine
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.request import Request
from torch_armllm.engine.scheduling.step import Scheduled, Step
from torch_armllm.patching import patch
from torch_armllm.plan import program
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import PlacedProgram, lay_out
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.skeleton import describe_modules

ALL = ".*"
SOME = r"v_proj|1\.mlp\.down_proj|0\.mlp\.(gate|up)_proj|1\.mlp\.up_proj|lm_head"
"""One layer of three with the same input; a gated pair, and half of one; other layers in each block."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


def quantized(
    pattern: str, family: str = "llama", dtype: torch.dtype = torch.float32, head: str = "int8"
) -> Any:
    """Returns a tiny quantized model; layers whose names match the pattern have two digits."""
    model = tiny(family, dtype)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.3, generator=generator)
    torch_armllm.quantize(model, Recipe(head=head, importance=False), progress=False)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and re.search(pattern, name):
            module.digits = 2
    model.config.quantization_config.modules = describe_modules(model)
    return model


def patched(
    pattern: str, family: str = "llama", dtype: torch.dtype = torch.float32, head: str = "int8"
) -> Any:
    model = quantized(pattern, family, dtype, head)
    report = torch_armllm.patch(model, progress=False)
    assert report.captured, report.capture_reason
    return model


@torch.no_grad()
def logits(model: Any, tokens: int = 13) -> Tensor:
    result: Tensor = model(token_ids(1, tokens)).logits
    return result


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[program.Instruction]:
    """Returns a list that gets the instructions of all plans that are compiled from now on."""
    instructions: list[program.Instruction] = []
    encode = PlacedProgram.encode

    def record(self: PlacedProgram) -> Any:
        instructions.extend(self.instructions)
        return encode(self)

    monkeypatch.setattr(PlacedProgram, "encode", record)
    monkeypatch.setattr(patch, "fault_of", lambda *_: None)  # the trial's `generate` compiles a head
    return instructions


def digits_of(instructions: list[program.Instruction]) -> list[tuple[str, Any]]:
    """Returns opcode and digits of each quantized layer."""
    found = []
    for instruction in instructions:
        fields: Any = instruction.fields
        fields = fields["layer"] if "norm" in fields else fields
        if "digits" in fields:
            found.append((instruction.opcode, fields["digits"]))
    return found


@pytest.mark.parametrize("pattern", [ALL, SOME])
@pytest.mark.parametrize("tokens", [1, 3, 13, 40])
def test_plan_computes_the_digits_of_each_layer(pattern: str, tokens: int) -> None:
    expected = logits(quantized(pattern), tokens)
    actual = logits(patched(pattern), tokens)
    assert error(actual, expected) < 1e-4
    assert error(logits(quantized("none"), tokens), expected) > 2e-3


def test_passes_merge_layers_of_equal_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = recorded(monkeypatch)
    patched(SOME)
    first = [("linear", 1), ("linear", 2), ("linear", 1), ("norm_gated_linear", 2), ("linear", 1)]
    second = [("linear", 1), ("linear", 2), ("linear", 1), ("linear", 1), ("linear", 2), ("linear", 2)]
    assert sorted(digits_of(instructions)) == sorted([*first, *second])
    instructions.clear()
    patched(ALL)
    block = [("norm_linear", 2), ("linear", 2), ("norm_gated_linear", 2), ("linear", 2)]
    assert digits_of(instructions) == 2 * block


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.float16), ("gemma3_text", torch.bfloat16)],
    ids=str,
)
def test_fused_norms_do_not_change_bits(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm that is fused writes the sum with its residual once for both digits of a token."""
    instructions = recorded(monkeypatch)
    fused = patched(ALL, family, dtype)
    opcodes = [i.opcode for i in instructions]
    assert opcodes.count("norm_linear") == 2 and opcodes.count("norm_gated_linear") == 2
    sums = [i.fields["norm"]["sum"] for i in instructions if "norm" in i.fields]  # type: ignore
    assert any(operand is not program.NOTHING for operand in sums)
    instructions.clear()
    monkeypatch.setattr("torch_armllm.plan.lower.fuse_norms", lambda _: 0)
    plain = patched(ALL, family, dtype)
    assert not any(i.opcode.startswith("norm_") for i in instructions)
    for tokens in (1, 2, 13, 40):
        assert torch.equal(logits(fused, tokens), logits(plain, tokens))


def test_outputs_are_the_same_alone_batched_and_chunked() -> None:
    model = patched(SOME)
    prompts = [[5, 6, 7], [9] * 40, [3], list(range(3, 22))]

    def generate(some: list[list[int]], **settings: Any) -> list[Any]:
        settings = {"kv_cache_memory": 4 << 20, "max_num_batched_tokens": 64, **settings}
        engine = build_engine(model, None, EngineConfig(**settings))
        submit(engine, some, GREEDY)
        return [output.outputs[0].token_ids for output in drain(engine)]

    alone = [generate([prompt])[0] for prompt in prompts]
    assert generate(prompts) == alone
    assert generate(prompts, max_num_batched_tokens=7, max_num_seqs=4) == alone


@pytest.mark.parametrize("head", ["int8", "g32i"])
def test_fused_head_equals_separate_head_bitwise(head: str) -> None:
    model = patched("lm_head", head=head)
    runner, step = plan_runner(model, 8), Step(decode_only=True)
    for number in range(3):
        prompt = token_ids(1, 11 + number)[0].tolist()
        (sequence,) = Request(str(number), prompt, SamplingParams(), seed=0).sequences
        sequence.blocks = [number]
        runner.execute(Step([Scheduled(sequence, 0, len(prompt) - 1)]))
        step.scheduled.append(Scheduled(sequence, len(prompt) - 1, 1))
    alone = runner.execute(step)
    runner.compute(step, best=True)
    fused = runner.compute(step, best=True)
    assert fused.best is not None and torch.equal(fused.logits, alone)
    expected = logits(quantized("lm_head", head=head), 13)[0, -1]
    assert error(alone[2], expected) < 1e-5


def test_program_with_other_digits_is_refused() -> None:
    instructions = program.Program()
    x, out = (instructions.allocate(32, torch.float32) for _ in range(2))
    weight = instructions.constant(torch.zeros(2, 320, dtype=torch.uint8))
    nothing = program.NOTHING
    layer = {"x": x, "out": out, "residual": nothing, "weight": weight, "bias": nothing}
    sizes = {"panel_stride": weight.stride, "in_features": 32, "out_features": 32}
    instructions.emit("linear", **layer, **sizes, scheme="row", digits=3, rotated=False)
    assert out.storage is not None
    instructions.outputs.append(out.storage)
    with pytest.raises(RuntimeError, match="has 3 digits; it can have 1 or 2"):
        NativePlan(lay_out(instructions))


def test_saved_models_keep_their_digits(tmp_path: Path) -> None:
    model = quantized(SOME)
    model.save_pretrained(tmp_path)
    described = model.config.quantization_config.modules
    assert {name for name, module in described.items() if "digits" in module} == {
        name for name, module in model.named_modules() if getattr(module, "digits", 1) == 2
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    digits = {name: m.digits for name, m in loaded.named_modules() if isinstance(m, QuantLinear)}
    assert digits == {name: m.digits for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert sorted(set(digits.values())) == [1, 2]
    assert "digits=2" in repr(loaded) and "digits=1" not in repr(loaded)
    assert torch.equal(logits(loaded), logits(patched(SOME)))


@pytest.mark.parametrize("digits", [0, 3, True, 2.0, "2", None])
def test_other_saved_digits_are_refused(digits: Any, tmp_path: Path) -> None:
    model = quantized("none")
    model.config.quantization_config.modules["lm_head"]["digits"] = digits
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lm_head has .* digits; it can have 1 or 2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_cached_plan_keeps_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMLLM_PLAN_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    quantized(SOME).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    engines = [LLM(str(tmp_path / "model"), progress=False) for _ in range(2)]
    assert [llm.has_model for llm in engines] == [True, False]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3)
    outputs = [llm.generate([[5, 6, 7], [9] * 40], params, use_tqdm=False) for llm in engines]
    assert len({repr([o.outputs[0].logprobs for o in some]) for some in outputs}) == 1
