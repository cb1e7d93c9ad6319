"""Valid calls of every op, and what of a call belongs to a token or to a sequence.

Calls are those of the fuzzer, with weights of random numbers in place of random bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.ops.arguments import Call, Spec, build
from tests.fuzz.ops.calls.every_op import CALLS
from tests.fuzz.ops.memory import GuardedMemory
from tests.fuzz.ops.target import tensors_of
from tests.support.packed_weights import packed
from torch_armllm.ops import linear, lora, mla
from torch_armllm.ops.attention import SCALED, kv_write, value_size_of
from torch_armllm.ops.linear.schemes import PANEL

_LINEAR, _SETTINGS = {"x": 1, "residual": 1}, {"top_k": 0, "top_p": 0, "min_p": 0, "repetition_penalty": 0}
_EXPERTS = {"x": 1, "expert_ids": 1, "expert_weights": 1}
_SAMPLE = {"logits": 1, "temperature": 0, **_SETTINGS, "presence_penalty": 0, "frequency_penalty": 0}

ROWS: dict[str, dict[str, int]] = {
    "rms_norm": {"x": 1},
    "add_rms_norm": {"x": 1, "residual": 1},
    "rms_norm_int8": {"x": 1, "residual": 1},
    "layer_norm": {"x": 1},
    "add_layer_norm": {"x": 1, "residual": 1},
    "rope_table": {"positions": 0},
    "rope_": {"q": 2, "k": 2, "cos": 1, "sin": 1},
    "gated_act": {"gate": 1, "up": 1},
    "int4_linear": _LINEAR,
    "int8_linear": _LINEAR,
    "int4_gated_linear": {"x": 1},
    "int4_linear_q": {"q": 1, "scales": 0, "residual": 1},
    "int4_gated_linear_q": {"q": 1, "scales": 0},
    "dense_linear": {"x": 1},
    "int8_heads_linear": {"x": 2},
    "dense_heads_linear": {"x": 2},
    "lora_linear": {"base": 1, "x": 1, "adapters": 0},
    "lora_embedding": {"base": 1, "ids": 0, "adapters": 0},
    "int4_moe": _EXPERTS,
    "int4_moe_lora": {**_EXPERTS, "adapters": 0},
    "moe_route": {"logits": 1, "token_ids": 0},
    "split_embedding": {"ids": 0},
    "sample": {**_SAMPLE, "seeds": 0, "steps": 0},
    "sample_probabilities": _SAMPLE,
    "best_tokens": {"logits": 1},
    "top_logprobs": {"logits": 1, "ids": 0},
    "gather_columns": {"x": 1},
}
"""Ops that compute each token alone: their arguments with an element per token, and its dimensions."""
SEQUENCES: dict[str, tuple[str, ...]] = {
    "paged_attention": ("q", "sinks", "relative", "later"),
    "mla_attention": ("q_latent", "q_rope", "selected"),
    "block_attention": ("q", "chosen"),
    "entry_attention": ("q", "selected"),
    "select_tokens": ("q", "weights"),
    "select_blocks": ("q",),
    "select_entries": ("q", "weights"),
    "causal_conv": ("x", "save_slots"),
    "gated_delta_rule": ("q", "k", "v", "gate", "beta", "save_slots"),
    "selective_scan": ("x", "dt", "b", "c", "save_slots"),
    "compress_windows": ("kv", "gate", "cos", "sin", "save_slots"),
}
"""Ops on sequences: their arguments with an element per token."""
TESTED = [name for name in CALLS if name not in ("isa_select", "isa_list", "team_threads", "plan_tables")]
"""Ops that compute."""
_BY_SEQUENCE = ("block_table", "seq_lens", "state_slots")
_PLAIN = GuardedMemory(0, 0)
"""Without slots: tensors are in torch's memory."""
_RAGGED = {"prompt_offsets": "prompt_ids", "output_offsets": "output_ids"}


@cache
def _written_by(op: str) -> tuple[str, ...]:
    schema = getattr(torch.ops.armllm, op).default._schema.arguments
    return tuple(a.name for a in schema if a.alias_info is not None and a.alias_info.is_write)


@dataclass(frozen=True)
class OpCall:
    """A call of an op.

    Attributes:
        name: of the op.
        arguments: by name; tokens lie along the first dimension of those that have some.
    """

    name: str
    arguments: dict[str, Any]

    @classmethod
    def random(cls, name: str, seed: int, flat: bool = True) -> OpCall:
        """Returns a valid call; not ``flat``: tokens may have any number of dimensions."""
        draw = Random(seed)
        call = CALLS[name](draw)
        torch.manual_seed(seed)
        arguments = {
            key: build(value, _PLAIN, draw)[0] if isinstance(value, Spec) else value
            for key, value in call.items()
        }
        arguments |= _weights(call)
        _bound(name, arguments)
        if name.endswith("_q"):
            arguments["q"].clamp_(min=-127)  # quantized rows hold no -128
        for key, dims in ROWS.get(name, {}).items() if flat else ():
            if isinstance(value := arguments.get(key), Tensor):
                dims += key == "positions" and arguments["axes"] is not None
                arguments[key] = value.reshape(-1, *value.shape[value.dim() - dims :])
        return cls(name, arguments)

    @property
    def op(self) -> Any:
        """The op."""
        return getattr(torch.ops.armllm, self.name).default

    @property
    def written(self) -> list[str]:
        """The arguments that the op writes."""
        return [name for name in _written_by(self.name) if isinstance(self.arguments.get(name), Tensor)]

    @property
    def by_token(self) -> list[str]:
        """The arguments with an element per token."""
        names = [*ROWS.get(self.name, ()), *SEQUENCES.get(self.name, ())]
        tensors = [name for name in names if isinstance(self.arguments.get(name), Tensor)]
        return [name for name in tensors if name != "sinks" or self.arguments[name].dim() == 2]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.arguments[self.by_token[0]])

    @property
    def folds(self) -> bool:
        """True if the number of tokens decides how an op multiplies: groups with float scales are folded."""
        scheme = self.arguments.get("scheme", "i8")
        return scheme not in linear.EXACT and not linear.traits_of(scheme).is_int8

    def replaced(self, **arguments: Any) -> OpCall:
        """Returns a call with other arguments."""
        return replace(self, arguments=self.arguments | arguments)

    def copied(self) -> OpCall:
        """Returns a call that writes to memory of its own."""
        return self.replaced(**{name: self.arguments[name].clone() for name in self.written})

    def run(self) -> list[Tensor]:
        """Calls the op; returns its results, and after them the rows that it has written."""
        results = list(tensors_of(self.op(**self.arguments)))
        return results + [self.arguments[name] for name in self.written if name in self.by_token]

    def part(self, tokens: slice) -> OpCall:
        """Returns a call of some tokens, for an op that computes each alone."""
        own = {name: self.arguments[name][tokens] for name in self.by_token}
        for offsets, ids in _RAGGED.items():
            if self.arguments.get(offsets) is not None:
                bounds = self.arguments[offsets]
                own[offsets] = bounds[tokens.start : tokens.stop + 1] - bounds[tokens.start]
                own[ids] = self.arguments[ids][int(bounds[tokens.start]) : int(bounds[tokens.stop])]
        return self.replaced(**own)

    def parts(self, draw: Random) -> Iterator[tuple[slice, OpCall]]:
        """Yields tokens and a call of them: of each sequence alone, most often in two parts."""
        starts = self.arguments["query_start"].tolist()
        ahead = self.arguments.get("ahead", 0) > 0 or self.arguments.get("later") is not None
        for number, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
            cut = end if ahead else draw.randint(first, end)
            for tokens in (slice(first, cut), slice(cut, end)):
                if tokens.start < tokens.stop:
                    yield tokens, self.sequence(number, tokens, end)

    def sequence(self, number: int, tokens: slice, end: int) -> OpCall:
        """Returns a call of some tokens of a sequence that ends before token ``end``."""
        own = {
            name: self.arguments[name][number : number + 1] for name in _BY_SEQUENCE if name in self.arguments
        }
        own["seq_lens"] = own["seq_lens"] - (end - tokens.stop)
        own["query_start"] = torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32)
        own |= {name: self.arguments[name][tokens] for name in self.by_token}
        return self.replaced(**own)


def _bound(name: str, arguments: dict[str, Any]) -> None:
    """Replaces bytes that are scales, most of which overflow, and factors of states that only grow."""
    cache, k_cache = arguments.get("cache"), arguments.get("k_cache")
    if isinstance(cache, Tensor) and cache.dtype == torch.int8:
        latent = arguments.get("latent", arguments.get("q_latent"))
        rank = latent.shape[-1]
        rows = torch.randn(cache[..., 0].numel(), cache.shape[-1] - 2 * torch.float32.itemsize)
        mla.mla_write(rows[:, :rank], rows[:, rank:], cache, torch.arange(len(rows)))
    if isinstance(k_cache, Tensor) and k_cache.dtype in SCALED:
        v_cache, scales = arguments["v_cache"], (arguments["k_scales"], arguments["v_scales"])
        blocks, heads, block_size = scales[0].shape
        sizes = arguments.get("q", arguments.get("k")).shape[-1], value_size_of(v_cache)
        rows = [torch.randn(blocks * block_size, heads, size) for size in sizes]
        kv_write(*rows, k_cache, v_cache, torch.arange(blocks * block_size), *scales)
    for key in ("a", "b", "inner_a", "inner_b", "outer_a", "outer_b"):
        factors = arguments.get(key)
        if isinstance(factors, Tensor) and factors.dtype == torch.int8:
            groups = factors.unflatten(-1, (-1, lora.BLOCK + torch.float32.itemsize))
            groups[..., lora.BLOCK :] = torch.rand(*groups.shape[:-1], 1).div(99).view(torch.int8)
    if name == "gated_delta_rule":
        arguments["gate"].abs_().neg_()
        arguments["k"].div_(arguments["k"].shape[-1] ** 0.5)
    if name == "selective_scan":
        arguments["a"].abs_().neg_()
        arguments["dt"].abs_()


def _weights(call: Call) -> dict[str, Tensor]:
    """Returns packed weights of random numbers: most random bytes have scales that overflow."""
    x = call.get("x", call.get("q"))
    if not isinstance(x, Spec):
        x = call.get("rest")
    found = {}
    for name in ("weight", "gate_up", "down"):
        spec = call.get(name)
        if not isinstance(spec, Spec) or spec.values != "bytes" or not isinstance(x, Spec):
            continue
        columns, rows = x.shape[-1], call.get("out_features", x.shape[0])
        if name != "weight":
            rows = call["intermediate"]
        if name == "down":
            rows, columns = columns, rows
        panels = math.ceil(rows / PANEL)
        scheme = call.get("scheme", "i8")
        each = [packed(rows, columns, scheme) for _ in range(math.prod(spec.shape[:-1]) // panels)]
        if spec.shape[-2] == 2 * panels:
            each = [linear.interleave_panels(a, b) for a, b in zip(each[::2], each[1::2], strict=True)]
        found[name] = torch.stack(each).view(spec.shape)
    return found
