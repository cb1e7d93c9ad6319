"""Check that a captured graph mixes tokens in attention and recurrences only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

import torch_armllm.capture.markers.attention
import torch_armllm.capture.markers.block_selection
import torch_armllm.capture.markers.compression
import torch_armllm.capture.markers.recurrent  # noqa: F401  (registers the marker ops)

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_POSITIONS = (5, 4, 17, 0, 11, 2)
_SUBSET = (1, 2, 0, 3)
"""Two positions of these lie below the number of all tokens, and not below that of the subset."""


def _attention(q: Tensor, k: Tensor, v: Tensor, selected: Tensor | None = None, **_: Any) -> Tensor:
    """Replaces attention by a function of each token's own query, key and value, and its selection."""
    groups = q.shape[1] // k.shape[1]
    steep = torch.linspace(0.5, 1.5, q.shape[-1], dtype=torch.float32)
    share = torch.sigmoid((q.float() * steep).mean(-1, keepdim=True))
    share = share * torch.sigmoid((k.float() * steep).mean(-1, keepdim=True)).repeat_interleave(groups, 1)
    if selected is not None:
        share = share * selected[:, None, :, None]
    return (share * v.float().repeat_interleave(groups, 1)).to(q.dtype).transpose(1, 2).contiguous()


def _selection(q: Tensor, k: Tensor, weights: Tensor, **_: Any) -> Tensor:
    scores = (q.float() * k.float()[:, :, None]).mean(-1)
    return torch.sigmoid((scores * weights.float()).sum(-1))


def _block_selection(q: Tensor, k: Tensor, **_: Any) -> Tensor:
    return torch.sigmoid((q.float() * k.float()).mean((1, 3)))


def _convolve(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return x * weight.sum(1, keepdim=True).to(x.dtype)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, **_: Any) -> Tensor:
    repeats = v.shape[2] // k.shape[2]
    share = (q.float() * k.float()).mean(-1).repeat_interleave(repeats, 2)
    factors = gate.float().exp()
    share = torch.sigmoid(share) * beta.float() * (factors if factors.dim() == 3 else factors.mean(-1))
    return (share[..., None] * v.float()).to(q.dtype)


def _scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None, **_: Any) -> Tensor:
    share = (dt.float()[:, :, None] * a).exp().mean(2)
    for factors in (b, c):
        share = share if factors is None else share * torch.sigmoid(factors.float()).mean(-1, keepdim=True)
    return (share * x.float()).to(x.dtype)


def _entries(kv: Tensor, gate: Tensor, bias: Tensor, weight: Tensor, cos: Tensor, **_: Any) -> Tensor:
    parts = (kv.float() * torch.sigmoid(gate.float())).unflatten(-1, (-1, weight.shape[0]))
    turns = torch.sigmoid(cos.float().sum(-1, keepdim=True))
    entries: Tensor = (parts.sum(2) * weight.float() * turns).to(kv.dtype)
    return entries


def _entry_selection(q: Tensor, entries: Tensor, weights: Tensor, **_: Any) -> Tensor:
    return _selection(q, entries, weights)


def _attention_to_entries(
    q: Tensor, kv: Tensor, entries: Tensor, selected: Tensor | None = None, **_: Any
) -> Tensor:
    rows = entries if selected is None else entries * selected[..., None]
    both = kv + rows[:, None].to(kv.dtype)
    return _attention(q, both, both)


class _TokenByToken(fx.Interpreter):
    stand_ins: dict[Any, Callable[..., Tensor]] = {
        torch.ops.armllm.attention.default: _attention,
        torch.ops.armllm.selection.default: _selection,
        torch.ops.armllm.block_selection.default: _block_selection,
        torch.ops.armllm.window_entries.default: _entries,
        torch.ops.armllm.entry_selection.default: _entry_selection,
        torch.ops.armllm.attention_to_entries.default: _attention_to_entries,
        torch.ops.armllm.convolve_tokens.default: _convolve,
        torch.ops.armllm.delta_rule.default: _delta_rule,
        torch.ops.armllm.scan_channels.default: _scan,
    }

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (stand_in := self.stand_ins.get(target)) is not None:
            names = (argument.name for argument in target._schema.arguments)
            return stand_in(**dict(zip(names, args, strict=False)), **kwargs)
        return super().call_function(target, args, kwargs)


class _Recorder(_TokenByToken):
    """Keeps the result of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.results[n] = result = super().run_node(n)
        return result.clone() if isinstance(result, Tensor) else result


@torch.no_grad()
def mixes_tokens(module: fx.GraphModule, vocab_size: int) -> bool:
    """True if tokens depend on each other, or on their number, outside of the markers.

    A step packs the new tokens of many sequences.  A convolution or a recurrence that no marker stands for,
    or counted positions, would be wrong in it.  The graph is therefore run with tokenwise replacements of the
    markers: each token's result must not change when the tokens are permuted and some of them are left out.

    Args:
        module: a captured graph of ``input_ids`` and ``position_ids``.
        vocab_size: number of token ids.
    """
    ids, positions, subset = _tokens(vocab_size)
    run = _TokenByToken(module, garbage_collect_values=True)
    full: Tensor = run.run(ids, positions)[:, subset]
    partial: Tensor = run.run(ids[:, subset], positions[:, subset])
    bound = _TOLERANCE.get(full.dtype, 3e-2) * float(full.float().abs().max())
    # Rounding may route one token to another expert; a graph that mixes tokens changes more than one.
    changed = (full.float() - partial.float()).abs().amax(-1).flatten() > bound
    return int(changed.sum()) > 1


def _tokens(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids and positions ``(1, T)``, and the numbers of the tokens that the second run has."""
    ids = torch.arange(3, 3 + 7 * len(_POSITIONS), 7)[None] % vocab_size
    return ids, torch.tensor(_POSITIONS)[None], torch.tensor(_SUBSET)


@torch.no_grad()
def first_mixing_node(module: fx.GraphModule, vocab_size: int) -> fx.Node | None:
    """Returns the first node of a graph that `mixes_tokens` whose results depend on other tokens."""
    ids, positions, subset = _tokens(vocab_size)
    full, partial = _Recorder(module), _Recorder(module)
    full.run(ids, positions)
    partial.run(ids[:, subset], positions[:, subset])
    for node, whole in full.results.items():
        part = partial.results.get(node)
        if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or whole.dim() != part.dim():
            continue
        sizes = list(zip(whole.shape, part.shape, strict=True))
        dims = [d for d, (a, b) in enumerate(sizes) if (a, b) == (len(_POSITIONS), len(_SUBSET))]
        if len(dims) != 1 or not part.numel() or whole.index_select(dims[0], subset).shape != part.shape:
            continue  # no dimension of tokens, or several, as in masks
        kept = whole.index_select(dims[0], subset).float()
        bound = _TOLERANCE.get(whole.dtype, 3e-2) * float(kept.abs().max())
        if bool(((kept - part.float()).abs() > bound).any()):
            return node
    return None
