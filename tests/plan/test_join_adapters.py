"""Joining of additions of adapters to layers of one input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.adapters import random_adapter
from tests.support.models import tiny
from torch_armllm import LLM, LoRARequest, Recipe, SamplingParams
from torch_armllm.plan import join_adapters, program
from torch_armllm.plan.native import NativePlan

PROMPTS = [list(range(5, 45 + number)) for number in range(3)]


def opcodes_and_outputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> tuple[list[str], list[tuple[int, ...]], list[float]]:
    """Returns the opcodes of a plan with adapters, and the tokens and log-probabilities of a mixed batch."""
    with monkeypatch.context() as patch_context:
        if not joined:
            patch_context.setattr("torch_armllm.plan.lower.join_adapters", lambda _: 0)
        llm = LLM(tiny("llama", torch.bfloat16), quantization=Recipe(importance=False), enable_lora=True,
                  max_loras=2, skip_tokenizer_init=True, progress=False)  # fmt: skip
    requests = [LoRARequest(str(n), n, str(folder / str(n))) for n in (1, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=[*requests, None])
    found = [output.outputs[0] for output in outputs]
    plan = llm.llm_engine.runner.plan
    assert isinstance(plan, NativePlan)
    return plan.opcodes, [tuple(o.token_ids) for o in found], [o.cumulative_logprob or 0.0 for o in found]


def test_joined_additions_do_not_change_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in enumerate(({}, {"target_modules": ["k_proj", "up_proj"], "r": 3}), 1):
        random_adapter(tiny("llama"), tmp_path / str(number), number, 1.0, **kind)
    single, *expected = opcodes_and_outputs(tmp_path, monkeypatch, joined=False)
    joined, *found = opcodes_and_outputs(tmp_path, monkeypatch, joined=True)
    assert found == expected
    layers, rest = divmod(single.count("lora"), 7)
    assert layers > 0 == rest and joined.count("lora") == 4 * layers  # q k v; o; gate up; down
    assert len(set(found[0])) == 3


def test_additions_to_what_another_reads_are_not_joined() -> None:
    plan = program.Program()
    rows, other = plan.allocate(128, torch.float32), plan.allocate(128, torch.float32)
    a, b = plan.constant(torch.ones(1, 2, 64)), plan.constant(torch.ones(1, 1, 2, 64))
    ranks = plan.constant(torch.ones(1, dtype=torch.int32))

    def count(*pairs: tuple[program.Operand, program.Operand]) -> int:
        plan.instructions.clear()
        for x, out in pairs:
            layer = {"x": x, "out": out, "a": a, "b": b, "ranks": ranks, "in_features": 64,
                     "out_features": 64}  # fmt: skip
            plan.emit("lora", adapters=ranks, slots=1, most_rank=2, listed=1, integers=False, layers=[layer])
        return join_adapters.join_adapters(plan)

    first, second, x = rows.view((64,), (1,)), rows.view((64,), (1,), 64), other.view((64,), (1,))
    assert count((x, first), (x, second)) == 1
    assert count((x, first), (x, first)) == 0
    assert count((x, first), (first, second)) == 0
    assert count((first, second), (x, first)) == 0
    assert count((x, first), (x, second), (first, x)) == 1
