"""A program with places in memory is the same after it was encoded and read back, and is edited by name."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.ops.recorded import pieces
from torch_armllm import patch
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.plan.placed_program import PlacedProgram, decode
from torch_armllm.plan.program import NOTHING, Operand


def program_of(family: str, quantization: str) -> PlacedProgram:
    model = tiny_model(family, torch.bfloat16)
    patch(model, quantization, progress=False)
    program: PlacedProgram = model.base_model.forward.plan.program
    return program


FAMILIES = {"llama": "int4", "gemma3_text": "int8", "qwen3_5_moe_text": "int4", "deepseek_v32": "int4"}


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_are_read_as_they_were_encoded(family: str) -> None:
    program = program_of(family, FAMILIES[family])
    encoded = program.encode()
    read = decode(*encoded)
    assert read == program and read.encode() == encoded
    assert program.schemes == {"g32iz" if FAMILIES[family] == "int4" else "i8"}


def test_all_kinds_of_fields_are_read_as_they_were_encoded() -> None:
    program = pieces().program
    read = decode(*program.encode())
    assert read == program and read.encode() == program.encode()
    assert program.schemes == {"i8"}, "those of experts and embeddings count"


@pytest.mark.parametrize("cut", [1, 2, 5, 9, -1])
def test_integers_that_end_early_are_no_program(cut: int) -> None:
    constants, integers, floats = pieces().program.encode()
    with pytest.raises(ValueError, match="the integers are no program"):
        decode(constants, integers[:cut], floats)


def test_an_instruction_with_a_wrong_size_is_refused() -> None:
    constants, integers, floats = pieces().program.encode()
    integers[3 + 2 * integers[1] + 1] += 1
    with pytest.raises(ValueError, match="'split_embed' has 26 integers"):
        decode(constants, integers, floats)


def test_handles_of_communicators_are_left_out() -> None:
    program = pieces().program
    shared = program.changed("moe", communicator=7).changed("best_tokens", communicator=9)
    assert shared != program
    assert shared.without_handles() == program


def test_instructions_are_changed_and_added_by_name() -> None:
    program = pieces().program
    (best,) = program.named("best_tokens")
    assert best.integer("vocab_size") == 10
    smaller = program.changed("best_tokens", vocab_size=9)
    assert [each.integer("vocab_size") for each in smaller.named("best_tokens")] == [9]
    extended, held = program.with_constant(torch.ones(3), stride=3)
    assert held == Operand("constant", len(program.constants), torch.float32, stride=3)
    assert extended.constants[-1].tolist() == [1, 1, 1] and len(program.constants) == held.index
    more = program.inserted(1, best)
    assert more.opcodes == [program.opcodes[0], "best_tokens", *program.opcodes[1:]]
    with pytest.raises(ValueError, match=r"unknown fields \['tokens'\]"):
        program.changed("best_tokens", tokens=1)


def test_fields_of_another_kind_are_refused() -> None:
    (lora,) = pieces().program.named("lora")
    for read, kind in ((lora.operand, "operand"), (lora.records, "list"), (lora.part, "part")):
        with pytest.raises(TypeError, match=f"'slots' holds no {kind}: 2"):
            read("slots")
    with pytest.raises(TypeError, match="'layers' holds no integer"):
        lora.integer("layers")
    with pytest.raises(TypeError, match="'layers' holds no number"):
        lora.real("layers")


def test_a_value_of_another_kind_is_not_encoded() -> None:
    program = pieces().program
    with pytest.raises(TypeError, match="field 'vocab_size' of instruction 'best_tokens' is not a valid int"):
        program.changed("best_tokens", vocab_size=NOTHING).encode()
