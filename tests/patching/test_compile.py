"""Every op supports torch.compile without graph breaks and torch.export, for any number of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

import torch_armllm.capture.export  # noqa: F401  (registers the marker ops too)
import torch_armllm.passes  # noqa: F401  (registers those of passes)
from torch_armllm.ops import attention, collective, linear, mla
from torch_armllm.ops.embedding import split_rest
from torch_armllm.quant.packing import quantize_matrices
from torch_armllm.quant.schemes.registry import scheme_named

_PLAN = {"plan_create", "plan_run", "plan_run_then", "plan_profile", "plan_free"}
_STORE = {"experts_open", "experts_require", "experts_counts", "experts_resident"}
_RANKS = {"communicator_open", "communicator_close"}
_TABLES = {"isa_select", "isa_list", "panel_sections", "plan_tables", "team_threads"}
NOT_COMPUTED = _TABLES | _PLAN | _STORE | _RANKS
"""Ops that manage the library; they have no tensor arguments or results that a graph could hold."""


def packed(rows: int, columns: int, scheme: str = "g32i", count: int = 1) -> Tensor:
    weights = list(torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(rows)))
    made = quantize_matrices(weights, scheme_named(scheme))[0]
    return made if count > 1 else made[0]


@functools.cache
def one_rank() -> int:
    return collective.open_communicator(collective.communicator_memory(1, 1 << 16), 0, 1, 1 << 16)


def adapters() -> tuple[Tensor, ...]:
    ranks, slots = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([1, -1, 0], dtype=torch.int32)
    return torch.randn(2, 3, 32), torch.randn(2, 1, 3, 64), ranks, slots


def both(scheme: str = "g32i", count: int = 1) -> Tensor:
    return linear.interleave_panels(packed(16, 32, scheme, count), packed(16, 32, scheme, count))


def paged(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A block table, query starts and lengths of one sequence."""
    starts, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return torch.arange(2, dtype=torch.int32)[None], starts, lengths


def steps(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The state slot, query starts and lengths of one sequence that has two earlier tokens."""
    _, starts, lengths = paged(tokens)
    return torch.tensor([1]), starts, lengths + 2


def int8_rows(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-9, 9, (tokens, 32), dtype=torch.int8), torch.rand(tokens)


def rows(tokens: int, size: int = 32) -> Tensor:
    return torch.randn(tokens, size)


def a_sampler(tokens: int) -> tuple[Any, ...]:
    half, whole = torch.full((tokens,), 0.5), torch.full((tokens,), 3)
    return (rows(tokens, 30), half, whole, half.clone(), half.clone(), whole.clone(), whole.clone())


def a_cache(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return tuple(attention.new_kv_cache(2, 1, 16, 16, 16, dtype))[:2]


def experts(tokens: int) -> tuple[Any, ...]:
    return rows(tokens), torch.arange(2 * tokens).view(tokens, 2) % 4, torch.full((tokens, 2), 0.5)


CASES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "int4_linear": lambda t: (rows(t), packed(16, 32), 16, "g32i", torch.randn(16), rows(t, 16)),
    "int8_linear": lambda t: (rows(t), packed(16, 32, "int8"), 16, torch.randn(16)),
    "int4_gated_linear": lambda t: (rows(t), both(), 16, "g32i", "silu"),
    "int4_linear_q": lambda t: (*int8_rows(t), packed(16, 32), 16, "g32i", "bfloat16"),
    "int4_gated_linear_q": lambda t: (*int8_rows(t), both(), 16, "g32i", "gelu", "float16"),
    "gather_columns": lambda t: (rows(t), one_rank(), [32]),
    "lora_linear": lambda t: (rows(t), rows(t), *adapters()),
    "lora_embedding": lambda t: (rows(t), torch.arange(t) % 9, torch.randn(2, 9, 3), *adapters()[1:]),
    "dense_linear": lambda t: (rows(t), torch.randn(16, 32), torch.randn(16)),
    "int8_heads_linear": lambda t: (torch.randn(t, 2, 32), packed(16, 32, "int8", 2), 16),
    "dense_heads_linear": lambda t: (torch.randn(t, 2, 32), torch.randn(2, 16, 32)),
    "pack_int4": lambda t: (torch.ones(t, 32).char(), torch.ones(t, 1).byte(), torch.rand(t), "g32i"),
    "pack_int8": lambda t: (torch.ones(t, 32).char(), torch.rand(t)),
    "search_steps": lambda t: (torch.randn(t, 2, 32), torch.ones(3, t, 2), torch.zeros(3, t, 2), None, -8, 7),
    "unpack_weight": lambda t: (packed(16, 32).repeat(t, 1, 1), 16, 32, "g32i"),
    "int4_moe": lambda t: (*experts(t), both(count=4), packed(32, 16, count=4), 16, "g32i", "silu"),
    "int4_moe_lora": lambda t: (
        *(*experts(t), both(count=4), packed(32, 16, count=4), 16, "g32i", "silu"),
        *(torch.randn(2, 4, 3, 32), torch.randn(2, 4, 2, 1, 3, 64), adapters()[2]),
        *(torch.randn(2, 4, 3, 16), torch.randn(2, 4, 1, 1, 3, 64), *adapters()[2:]),
    ),
    "moe_route": lambda t: (rows(t, 16), 2, "sigmoid", True, 1.0, torch.randn(16), 4, 2),
    "rms_norm": lambda t: (rows(t), torch.randn(32), 1e-5),
    "add_rms_norm": lambda t: (rows(t), rows(t), torch.randn(32), 1e-5),
    "rms_norm_int8": lambda t: (rows(t), torch.randn(32), 1e-5, 1.0, rows(t)),
    "layer_norm": lambda t: (rows(t), torch.randn(32), torch.randn(32), 1e-5),
    "add_layer_norm": lambda t: (rows(t), rows(t), torch.randn(32), None, 1e-5),
    "rope_table": lambda t: (torch.arange(t), torch.rand(8), 1.0),
    "rope_": lambda t: (torch.randn(t, 2, 16), torch.randn(t, 1, 16), rows(t, 8), rows(t, 8)),
    "split_embedding": lambda t: (
        torch.arange(t),
        packed(16, 32, "int8"),
        split_rest(torch.randn(16, 32).bfloat16(), packed(16, 32, "int8")),
        "bfloat16",
    ),
    "gated_act": lambda t: (rows(t), rows(t), "silu"),
    "kv_write": lambda t: (torch.randn(t, 1, 16), torch.randn(t, 1, 16), *a_cache(t), torch.arange(t)),
    "paged_attention": lambda t: (torch.randn(t, 2, 16), *a_cache(t), *paged(t), 16, 0.25),
    "mla_write": lambda t: (
        rows(t),
        rows(t, 8),
        mla.new_latent_cache(2, 32, 8, 16, torch.float32),
        torch.arange(t),
    ),
    "mla_attention": lambda t: (
        torch.randn(t, 2, 32),
        torch.randn(t, 2, 8),
        mla.new_latent_cache(2, 32, 8, 16, torch.float32),
        *paged(t),
        16,
        0.25,
    ),
    "select_tokens": lambda t: (
        torch.randn(t, 2, 16),
        torch.randn(t, 2),
        torch.randn(2, 16, 16),
        *paged(t),
        *(16, 0.25, 3),
    ),
    "select_blocks": lambda t: (torch.randn(t, 2, 16), torch.randn(2, 16, 16), *paged(t), 16, 16, 1, 1),
    "block_attention": lambda t: (
        *(torch.randn(t, 2, 16), *a_cache(t)),
        torch.zeros(t, 1, 2, dtype=torch.int32),
        *(32, *paged(t), 16, 0.25),
    ),
    "sample": a_sampler,
    "sample_probabilities": lambda t: a_sampler(t)[:5],
    "best_tokens": lambda t: (rows(t, 30),),
    "top_logprobs": lambda t: (rows(t, 30), torch.arange(t) % 30, 3),
    "causal_conv": lambda t: (
        rows(t),
        torch.randn(4, 32),
        torch.randn(32),
        torch.randn(2, 3, 32),
        *steps(t),
        True,
    ),
    "sinkhorn": lambda t: (torch.rand(t, 4, 4), 3, 1e-6),
    "compress_windows": lambda t: (
        *(rows(t), rows(t), torch.randn(4, 32), torch.randn(16), rows(t, 4), rows(t, 4)),
        *(torch.randn(2, 7, 64), torch.randn(2, 4, 16), torch.zeros(1, 1, dtype=torch.int32)),
        *(*steps(t), 16, 1e-6),
    ),
    "select_entries": lambda t: (
        *(torch.randn(t, 2, 16), torch.randn(t, 2), torch.randn(2, 4, 16)),
        *(*paged(t), 16, 16, 4, 0.25, 3),
    ),
    "entry_attention": lambda t: (
        *(torch.randn(t, 2, 16), torch.randn(2, 16, 16), torch.randn(2, 4, 16)),
        *(*paged(t), 16, 0.25, 3, 4, torch.randn(2)),
    ),
    "gated_delta_rule": lambda t: (
        *(rows(t).view(t, 2, 16) for _ in range(2)),
        torch.randn(t, 4, 8),
        -torch.rand(t, 4),
        torch.rand(t, 4),
        torch.randn(2, 4, 16, 8),
        *steps(t),
        *(0.25, True),
    ),
    "selective_scan": lambda t: (
        *(torch.randn(t, 32), torch.rand(t, 32), -torch.rand(8, 32)),
        *(torch.randn(t, 8), None),
        torch.randn(2, 8, 32),
        *steps(t),
    ),
    "scan_channels": lambda t: (
        *(torch.randn(1, t, 32), torch.rand(1, t, 32), -torch.rand(8, 32)),
        *(torch.randn(1, t, 8), None),
    ),
    "convolve_tokens": lambda t: (torch.randn(1, 32, t), torch.randn(32, 4), torch.randn(32), True),
    "delta_rule": lambda t: (
        *(torch.randn(1, t, 2, 16) for _ in range(2)),
        torch.randn(1, t, 4, 8),
        -torch.rand(1, t, 4),
        torch.rand(1, t, 4),
        *(0.25, True),
    ),
    "attention": lambda t: (
        torch.randn(1, 2, t, 16),
        torch.randn(1, 1, t, 16),
        torch.randn(1, 1, t, 16),
        *(0, 0.25, 0, 0.0, None),
    ),
    "biased_attention": lambda t: (
        torch.randn(1, 2, t, 16),
        torch.randn(1, 1, t, 16),
        torch.randn(1, 1, t, 16),
        torch.randn(1, 2, t, t),
        *(0, 0.25, 0, 0.0, None),
    ),
    "distance_bias": lambda t: (torch.randn(1, t, 2, 3), torch.randn(3, 6)),
    "selection": lambda t: (torch.randn(1, t, 2, 16), torch.randn(1, t, 16), torch.randn(1, t, 2), 0.25, 3),
    "block_selection": lambda t: (torch.randn(1, 2, t, 16), torch.randn(1, 1, t, 16), 2, 2, 1),
    "window_entries": lambda t: (
        *(rows(t)[None], rows(t)[None], torch.randn(2, 32), torch.randn(16)),
        *(rows(t, 4)[None], rows(t, 4)[None], 1e-6),
    ),
    "entry_selection": lambda t: (
        *(torch.randn(1, t, 2, 16), torch.randn(1, t, 16), torch.randn(1, t, 2), 0.25, 3, 2),
    ),
    "attention_to_entries": lambda t: (
        *(torch.randn(1, 2, t, 16), torch.randn(1, 1, t, 16), torch.randn(1, t, 16)),
        *(0, 0.25, 3, None, 2),
    ),
    "given_rows": lambda t: (torch.arange(t)[None], 8, torch.bfloat16),
    "encoder_states": lambda t: (torch.arange(t)[None], 8, torch.bfloat16),
    "encoder_attention": lambda t: (
        torch.randn(1, 4, t, 8),
        torch.randn(1, 2, 3, 8),
        torch.randn(1, 2, 3, 6),
        *(1, 0.25, torch.randn(1, 4, t, 3)),
    ),
    "relative_bias": lambda t: (torch.randn(3, 9), t),
    "token_types": lambda t: (torch.arange(t)[None], 2),
    "experts": lambda t: (*experts(t), torch.randn(4, 32, 32), torch.randn(4, 32, 16), "silu"),
    "expand_kv": lambda t: (
        torch.randn(1, 1, t, 16),
        torch.randn(1, 1, t, 4),
        torch.randn(24, 16),
        *(2, 8, 4, ""),
    ),
    "layer_begin": lambda t: (torch.randn(t, 16), 0),
    "layer_end": lambda t: (torch.randn(t, 16), 0),
    "layer_repeat": lambda t: (torch.randn(t, 16), 1, 0),
}
"""Arguments for ``t`` tokens; tensors whose shape depends on ``t`` are dynamic."""


def registered() -> list[str]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("armllm::")}
    return sorted(name.removeprefix("armllm::") for name in names)


class Call(nn.Module):
    """One op with tensors as inputs and all other arguments fixed; returns results and written tensors."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.op = getattr(torch.ops.armllm, name).default
        self.arguments = tuple(None if isinstance(a, Tensor) else (a,) for a in arguments)
        written = [i for i, a in enumerate(self.op._schema.arguments) if a.alias_info is not None]
        self.writes = [i for i in written if i < len(arguments)]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        filled = [next(given) if fixed is None else fixed[0] for fixed in self.arguments]
        for index in self.writes:
            filled[index] = filled[index].clone()
        out = self.op(*filled)
        results = [out] if isinstance(out, Tensor) else list(out or ())
        return results + [filled[index] for index in self.writes]


def make(name: str, tokens: int) -> tuple[Call, list[Tensor]]:
    torch.manual_seed(tokens)
    arguments = CASES[name](tokens)
    return Call(name, arguments), [argument for argument in arguments if isinstance(argument, Tensor)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(found, expected, strict=True)
    )


def test_every_op_has_a_case() -> None:
    assert sorted(CASES.keys() | NOT_COMPUTED) == registered()


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CASES))
def test_compile_creates_one_graph_for_all_token_counts(name: str) -> None:
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    call, inputs = make(name, 5)
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    assert same(compiled(*inputs), call(*inputs))
    inputs = make(name, 9)[1]
    assert same(compiled(*inputs), call(*inputs))
    assert len(graphs) == 1
    assert call.op in {node.target for node in graphs[0].graph.nodes}


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(CASES))
def test_export_creates_a_program_for_all_token_counts(name: str) -> None:
    call, inputs = make(name, 5)
    other = make(name, 9)[1]
    dynamic = tuple(
        {i: torch.export.Dim.AUTO for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n}
        for a, b in zip(inputs, other, strict=True)
    )
    program = torch.export.export(call, tuple(inputs), dynamic_shapes=(dynamic,), strict=False)
    assert call.op in {node.target for node in program.graph.nodes}
    for tensors in (inputs, other):
        assert same(program.module()(*tensors), call(*tensors))
