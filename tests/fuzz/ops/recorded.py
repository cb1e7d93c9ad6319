"""Programs of plans as models record them, and valid inputs of their steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import torch
from torch import Tensor

import torch_armllm
from tests.fuzz.ops.arguments import Spec
from tests.fuzz.ops.calls.recurrent import STATES, saved_states
from tests.fuzz.ops.memory import GuardedMemory
from torch_armllm.kv_cache.shapes import Shape
from torch_armllm.model_survey.tiny_models import tiny_model
from torch_armllm.ops import linear
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.placed_program import PlacedProgram, lay_out
from torch_armllm.plan.program import NOTHING, Operand, Program

_MODELS: tuple[tuple[str, str | None, torch.dtype, str | None], ...] = (
    ("llama", "int4", torch.float32, None),
    ("qwen3", "int4", torch.bfloat16, "int8"),
    ("gemma3_text", "int8", torch.float32, "bfloat16"),
    ("gpt_oss", "int4", torch.float32, "float16"),
    ("olmoe", "int4", torch.bfloat16, None),
    ("deepseek_v3", "int4", torch.float32, None),
    ("deepseek_v2", "int4", torch.bfloat16, "int8"),
    ("deepseek_v32", "int4", torch.float32, None),
    ("minimax_m3_vl_text", "int4", torch.bfloat16, None),
    ("qwen3_5_moe_text", "int4", torch.bfloat16, None),
    ("kimi_linear", "int4", torch.float32, None),
    ("nemotron_h", "int4", torch.float32, None),
    ("jamba", "int4", torch.bfloat16, None),
    ("inkling_text", "int4", torch.bfloat16, None),
    ("hy_v4", "int4", torch.float32, None),
)
"""Families, their quantization, dtype, and dtype of the cache: together they use nearly all instructions."""
_SIZES = {
    "deepseek_v32": {"index_topk": 8},
    "minimax_m3_vl_text": {"index_block_size": 32, "index_topk_blocks": 1},
}
"""Settings of families: indexers select fewer tokens than most sequences have."""
VOCABULARY = 60


@dataclass(frozen=True)
class Recorded:
    """A program, and the shape of the cache that it uses."""

    name: str
    program: PlacedProgram
    shape: Shape | None
    memory: GuardedMemory = field(repr=False, compare=False)


def _guarded(program: PlacedProgram) -> tuple[PlacedProgram, GuardedMemory]:
    """Moves the constants to memory between guard pages, at the end of it."""
    sizes = [_extent(t) for t in program.constants]
    largest = max(size * t.element_size() for size, t in zip(sizes, program.constants, strict=True))
    memory = GuardedMemory(len(sizes), largest)
    constants = []
    for size, tensor in zip(sizes, program.constants, strict=True):
        flat, _ = memory.take(size, tensor.dtype, at_end=True)
        flat.copy_(tensor.as_strided((size,), (1,)))
        constants.append(flat.as_strided(tensor.shape, tensor.stride()))
    return replace(program, constants=constants), memory


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@cache
def models() -> list[Recorded]:
    """Returns the programs of a few tiny models."""
    found = []
    for family, quantization, dtype, cache_dtype in _MODELS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sizes = _SIZES.get(family, {})
            model = tiny_model(family, dtype, vocab_size=VOCABULARY, pad_token_id=0, **sizes)
            torch_armllm.patch(model, quantization, kv_cache_dtype=cache_dtype, progress=False)
        forward = model.base_model.forward
        assert isinstance(forward.plan, NativePlan), family
        program, memory = _guarded(forward.plan.program)
        found.append(Recorded(f"{family}-{quantization}", program, forward.shape, memory))
    return found


@cache
def head(columns: int, dtype: torch.dtype) -> Recorded:
    """Returns a program that reads the hidden states of another: an output layer and its best tokens."""
    p = Program()
    generator = torch.Generator().manual_seed(columns)
    hidden = Operand("input", 0, dtype, (columns,), 0, columns)
    weight = p.constant(_packed_int8(VOCABULARY, columns, generator))
    logits = p.allocate(VOCABULARY, dtype)
    sizes = {"in_features": columns, "out_features": VOCABULARY}
    p.emit("linear", x=hidden, out=logits, residual=NOTHING, weight=weight, bias=NOTHING,
           panel_stride=weight.stride, scheme="i8", digits=2, rotated=columns % 32 == 0,
           **sizes)  # fmt: skip
    best = p.allocate(1, torch.int64)
    p.emit("best_tokens", logits=logits, ids=best, vocab_size=VOCABULARY, communicator=0, first=0)
    assert logits.storage is not None and best.storage is not None
    p.outputs += [logits.storage, best.storage]
    program, memory = _guarded(lay_out(p))
    return Recorded("head", program, None, memory)


def _adapted_experts(p: Program, x: Operand, generator: torch.Generator) -> Operand:
    """Writes experts with adapters; returns their result, which is like their input."""
    experts, width = 3, x.width
    weights, ids = p.allocate(2, torch.float32), p.allocate(2, torch.int32)
    p.emit("route", logits=x.view((experts,), (1,)), weights=weights, ids=ids, correction_bias=NOTHING,
           token_ids=NOTHING, choices=NOTHING, vocabulary=0, experts=experts, top_k=2, groups=1,
           top_k_groups=1, scoring="softmax", renormalize=True, scale=1.0, epsilon=0.0)  # fmt: skip
    packed = torch.stack([_packed_int8(width, width, generator) for _ in range(experts)])
    panels = p.constant(packed)

    def rows(*shape: int) -> Operand:
        return p.constant(torch.randn(2, experts, *shape, generator=generator).bfloat16())

    vectors = {"inner_ranks": [4, 1], "outer_ranks": [0, 3], "adapters": [1, -1, 0]}
    lora = {name: p.constant(torch.tensor(n, dtype=torch.int32)) for name, n in vectors.items()}
    lora |= {"inner_a": rows(4, width), "inner_b": rows(1, 1, 4, 64)}
    lora |= {"outer_a": rows(3, width), "outer_b": rows(1, 1, 3, 64)}
    sizes = {"slots": 2, "inner_rank": 4, "outer_rank": 3, "listed": 3, "integers": False}
    out = p.allocate(width, x.dtype, x.inner)
    p.emit("moe", x=x, out=out, ids=ids, weights=weights, gate_up=panels, down=panels, gate_up_bias=NOTHING,
           down_bias=NOTHING, gate_up_expert_stride=packed.stride(0), down_expert_stride=packed.stride(0),
           gate_up_panel_stride=packed.stride(1), down_panel_stride=packed.stride(1), scheme="i8",
           experts=experts, identity_experts=0, top_k=2, hidden=width, intermediate=width, activation="silu",
           limit=0.0, up_limit=0.0, gated=False, weigh_input=False, rotated=False, communicator=0, ranks=[],
           rank_experts=[], lora=[{**lora, **sizes}])  # fmt: skip
    return out


@cache
def pieces() -> Recorded:
    """Returns a program of instructions that the models lack."""
    p = Program()
    generator = torch.Generator().manual_seed(0)
    heads, size, width = 2, 16, 32
    ids = Operand("input", 0, torch.int64)
    embedded = p.allocate(width, torch.bfloat16, (heads, size))
    table = p.constant(_packed_int8(VOCABULARY, width, generator))
    rest = p.constant(torch.randint(-127, 128, (VOCABULARY, width), generator=generator, dtype=torch.int8))
    p.emit("split_embed", out=embedded, ids=ids, weight=table, rest=rest, panel_stride=table.stride,
           scheme="i8", width=width, vocab_size=VOCABULARY, rotated=width % 32 == 0)  # fmt: skip
    rows = p.constant(torch.randn(2, VOCABULARY, 4, generator=generator).bfloat16())
    b = p.constant(torch.randn(2, 1, 4, 64, generator=generator).bfloat16())
    ranks, slots = (p.constant(torch.tensor(n, dtype=torch.int32)) for n in ([4, 3], [1, -1, 0]))
    p.emit("lora_embed", ids=ids, out=embedded, table=rows, b=b, ranks=ranks, adapters=slots, slots=2,
           most_rank=4, listed=3, integers=False, vocab_size=VOCABULARY, width=width)  # fmt: skip
    embedded = _adapted_experts(p, embedded, generator)
    permuted = p.allocate(width, torch.bfloat16, (heads, size))
    order = p.constant(torch.randperm(width, generator=generator).int())
    p.emit("reorder", x=embedded, permutation=order, out=permuted, width=width)
    wide = p.allocate(heads * 20, torch.bfloat16, (heads, 20))
    packed = torch.stack([_packed_int8(20, size, generator) for _ in range(heads)])
    sizes = {"heads": heads, "in_features": size, "out_features": 20, "x_head_stride": size}
    strides = {"head_stride": packed.stride(0), "panel_stride": packed.stride(1)}
    p.emit("int8_heads", x=permuted, out=wide, weight=p.constant(packed), **sizes, **strides)
    narrow = p.allocate(heads * 5, torch.bfloat16, (heads, 5))
    dense = p.constant(torch.randn(heads, 5, 20, generator=generator))
    p.emit("dense_heads", x=wide, out=narrow, weight=dense, heads=heads, in_features=20, out_features=5,
           x_head_stride=20)  # fmt: skip
    a = p.constant(torch.randn(2, 4, 40, generator=generator).bfloat16())
    layer = {"x": wide, "out": narrow, "a": a, "b": b, "ranks": ranks, "in_features": 40, "out_features": 10}
    p.emit("lora", adapters=slots, slots=2, most_rank=4, listed=3, integers=False, layers=[layer])
    norm = p.allocate(10, torch.bfloat16)
    scale = p.constant(torch.ones(10))
    p.emit("layer_norm", x=narrow, out=norm, residual=NOTHING, sum=NOTHING, weight=scale, bias=NOTHING,
           rows_per_token=1, width=10, eps=1e-5, weight_offset=0.0)  # fmt: skip
    best = p.allocate(1, torch.int64)
    p.emit("best_tokens", logits=norm, ids=best, vocab_size=10, communicator=0, first=0)
    assert norm.storage is not None and best.storage is not None
    p.outputs += [norm.storage, best.storage]
    program, memory = _guarded(lay_out(p))
    return Recorded("pieces", program, None, memory)


def _packed_int8(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    q = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    return linear.pack_int8(q, torch.rand(rows, generator=generator))


def step_inputs(recorded: Recorded, draw: Random) -> tuple[dict[str, Spec], int]:
    """Returns descriptions of valid inputs of a step, in order, and its tokens."""
    if recorded.shape is None:
        tokens = draw.choice((1, 1, 2, 5, 17))
        return {"ids": Spec((1, tokens), torch.int64, (0, VOCABULARY - 1))}, tokens
    size, blocks = recorded.shape.block_size, draw.choice((1, 2, 4))
    starts, lengths, table, slots = [0], [], [], []
    columns = draw.randint(1, 3)
    free = [block * size + i for block in range(blocks) for i in range(size)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        length = draw.randint(1, columns * size)
        new = draw.choice((1, 1, 1, min(length, 4), min(length, 20)))
        lengths.append(length)
        starts.append(starts[-1] + new)
        table += [draw.randrange(blocks) for _ in range(columns)]
        slots += draw.sample(free, new)
    tokens, count = starts[-1], len(lengths)
    inputs = {
        "ids": Spec((1, tokens), torch.int64, (0, VOCABULARY - 1)),
        "positions": Spec((1, tokens), torch.int64, (0, 3 * size)),
        "slots": Spec((tokens,), torch.int64, slots),
        "block_table": Spec((count, columns), torch.int32, table),
        "query_start": Spec((count + 1,), torch.int32, starts),
        "seq_lens": Spec((count,), torch.int32, lengths),
    }
    for number, tensor in enumerate(_cache_like(recorded.shape, blocks)):
        inputs[f"cache{number}"] = Spec(tuple(tensor.shape), tensor.dtype)
    if recorded.shape.states:
        rows = count + draw.choice((0, 0, 3))
        order = draw.sample(range(rows), rows)
        inputs["state_slots"] = Spec((count,), torch.int64, order[:count])
        inputs["save_slots"] = saved_states(draw, tokens, order[count:])
        states = recorded.shape.states.stored_as(draw.choice(STATES))
        for number, tensor in enumerate(states.tensors(rows)):
            inputs[f"cache of states {number}"] = Spec(tuple(tensor.shape), tensor.dtype)
    return inputs, tokens


def _cache_like(shape: Shape, blocks: int) -> list[Tensor]:
    """Returns empty tensors like those of a cache."""
    return [tensor for tensor in shape.tensors(blocks) if tensor is not None]
