"""Layers of an encoder of audio or pictures, and the plan that computes them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from torch_armllm.capture.export import CaptureError
from torch_armllm.hf.model_kind import kind_of
from torch_armllm.patching.build_plan import BuiltPlan, build_plan
from torch_armllm.patching.forwards.encoder_angles import ANGLES, PLACES, angles_form
from torch_armllm.patching.forwards.packed_attention import is_packed_attention, whole_texts_in
from torch_armllm.patching.forwards.text_steps import TextSteps, whole_texts
from torch_armllm.patching.forwards.unserved import Unserved
from torch_armllm.plan.native import NativePlan, native_plan
from torch_armllm.plan.picture_inputs import input_after, with_given_angles
from torch_armllm.plan.step import Plan

_IDS = 1000
"""Token ids of the checks of a plan, whose rows are functions of them."""
_MASK, _LENGTHS = "attention_mask", "cu_seqlens"
_SLOWEST = 1e-4
"""Factor between the first and the last frequency by which checks rotate."""


class EncoderLayers(nn.Module):
    """Layers of an encoder as a base model; capture makes a graph of it as of any model.

    Args:
        config: the encoder's.
        layers: consecutive ones; they take hidden states ``(batch, T, hidden)``, and a mask, which is None;
            or hidden states ``(T, hidden)`` of packed texts and their ends.  Some rotate by angles.

    Attributes:
        angles: form of the angles that the layers rotate by; None: they are given none.

    Raises:
        CaptureError: the layers take something else.
    """

    _frequencies: Tensor

    def __init__(self, config: Any, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        names = _arguments_of(layers[0])
        self.angles = angles_form(names)
        self._absent: dict[str, Any] = {name: None for name in (_MASK, _LENGTHS) if name in names}
        self._attentions = [_packed_attention_of(layer) for layer in layers] if _LENGTHS in names else []
        norms = (child for name, child in layers[0].named_children() if "norm" in name)
        weight = getattr(next(norms, None), "weight", None)
        if weight is None:
            raise CaptureError("its layers have no norm of the hidden states")
        self._columns = len(weight)
        half = 0 if self.angles is None else _head_size_of(layers[0]) // 2
        self.register_buffer(
            "_frequencies", _SLOWEST ** (torch.arange(half) / max(half, 1)), persistent=False
        )
        self._dtype = next(p.dtype for p in self.layers.parameters() if p.is_floating_point())
        self._ids = nn.Embedding(_IDS, 1, dtype=self._dtype)

    def get_input_embeddings(self) -> nn.Module:
        """Returns an embedding of the ids of checks; it is not computed."""
        return self._ids

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> BaseModelOutput:
        """Computes the hidden states after the last layer of rows that are given."""
        hidden = torch.ops.armllm.given_rows(input_ids, self._columns, self._dtype)
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        others = self._others(positions)
        with whole_texts_in(self._attentions):
            for layer in self.layers:
                result = layer(hidden, **others)
                hidden = result[0] if isinstance(result, tuple) else result
        return BaseModelOutput(last_hidden_state=hidden)

    def _others(self, positions: Tensor) -> dict[str, Any]:
        """Returns what layers take beside hidden states, for tokens at positions ``(1, T)``."""
        if self.angles is None:
            return self._absent
        angles = positions[..., None].float() * self._frequencies
        return self._absent | self.angles.of_checks(angles, self._dtype)

    @torch.no_grad()
    def returns_tuple(self) -> bool:
        """Returns True if the result of a layer is a tuple that begins with the hidden states."""
        hidden = torch.zeros(1, 2, self._columns, dtype=self._dtype)
        with whole_texts_in(self._attentions):
            return isinstance(self.layers[0](hidden, **self._others(torch.arange(2)[None])), tuple)


def _arguments_of(layer: nn.Module) -> set[str]:
    """Returns the names of what a layer takes beside hidden states.

    Raises:
        CaptureError: it takes something that is not known.
    """
    parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    unknown = sorted(needed - {_MASK, _LENGTHS, *ANGLES})
    if unknown:
        raise CaptureError(f"its layers take {', '.join(unknown)}, which plans do not know")
    return {p.name for p in parameters}


def _packed_attention_of(layer: nn.Module) -> Any:
    attention = next((m for m in layer.modules() if is_packed_attention(m)), None)
    if attention is None:
        raise CaptureError("its attention to packed texts is of another form")
    return attention


def _head_size_of(layer: nn.Module) -> int:
    sizes = (getattr(module, "head_dim", None) for module in layer.modules())
    size = next((size for size in sizes if size is not None), None)
    if size is None:
        raise CaptureError("its layers rotate, and the size of their heads is not known")
    return int(size)


class LayersPlan:
    """Computation of consecutive layers of an encoder by a plan, in the place of the first one's ``forward``.

    Args:
        layers: what the plan was made from.
        built: the plan.

    Attributes:
        calls: number of them.
    """

    def __init__(self, layers: EncoderLayers, built: BuiltPlan) -> None:
        self.layers = list(layers.layers)
        self.plan: Plan = built.plan
        self.calls = 0
        self._names = list(inspect.signature(self.layers[0].forward).parameters)
        self._returns_tuple = layers.returns_tuple()
        self._steps = TextSteps(built.shape)
        self._angles = layers.angles
        if layers.angles is not None:
            if (plan := native_plan(built.plan)) is None:
                raise CaptureError("its layers rotate by two positions, which only a native plan computes")
            number = input_after(built.shape.tensors(0)) + 1
            self.plan = NativePlan(with_given_angles(plan.program, number))

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Computes the layers; the first one's ``forward`` documents the arguments.

        Raises:
            Unserved: the mask is not that of whole texts.
        """
        hidden, named = self._arguments(args, named)
        kept = _kept_rows(hidden, named)
        counts = _counts(hidden, named) if kept is None else kept.sum(-1)
        counts = counts[counts > 0]
        self.calls += 1
        rows = hidden.reshape(-1, hidden.shape[-1])
        given = () if self._angles is None else self._angles.read(named)
        angles = [t.float().repeat(len(rows) // max(len(t), 1), 1) for t in given]
        if kept is not None:
            rows, *angles = (t[kept.flatten()] for t in (rows, *angles))
        computed = self._compute(rows, counts, angles)
        if kept is not None:
            computed = hidden.masked_scatter(kept[..., None], computed)
        return self._result(computed.view(hidden.shape))

    def skip(self, *args: Any, **named: Any) -> Any:
        """Returns what the first layer returned, in the place of the others' ``forward``."""
        return self._result(self._arguments(args, named)[0])

    def _arguments(self, args: Sequence[Any], named: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Returns the hidden states, and the other arguments by their names."""
        named = named | dict(zip(self._names, args, strict=False))
        return named.pop(self._names[0]), named

    def _result(self, hidden: Tensor) -> Any:
        return (hidden,) if self._returns_tuple else hidden

    def _compute(self, rows: Tensor, counts: Tensor, angles: Sequence[Tensor]) -> Tensor:
        """Returns the results ``(T, hidden)`` of the rows of texts."""
        parts, start = [], 0
        for begin, end in whole_texts(counts.tolist()):
            of_step = counts[begin:end]
            stop = start + int(of_step.sum())
            ids = torch.zeros(1, stop - start, dtype=torch.int64)
            inputs = self._steps.step(of_step, ids, ids, rows[start:stop].contiguous())
            inputs.angles = tuple(t[start:stop] for t in angles)
            parts.append(self.plan.run(inputs).clone())
            start = stop
        return torch.cat(parts) if parts else rows


def _kept_rows(hidden: Tensor, named: dict[str, Any]) -> Tensor | None:
    """Returns the rows bool ``(batch, T)`` that are not padding; None if positions do not say so.

    Raises:
        Unserved: the mask hides others.
    """
    places, mask = named.get(PLACES), named.get(_MASK)
    if places is None:
        return None
    kept: Tensor = (places != -1).any(-1)
    if mask is None:
        hidden_rows = not bool(kept.all())
    else:
        shown = mask if mask.dtype == torch.bool else mask == 0
        hidden_rows = shown.dim() != 4 or not bool((shown == kept[:, None, None]).all())
    if hidden_rows or kept.shape != hidden.shape[:2]:
        raise Unserved("the encoder's layers have a mask that hides others than rows of padding")
    return kept


def _counts(hidden: Tensor, named: dict[str, Any]) -> Tensor:
    """Returns the tokens of each text.

    Raises:
        Unserved: the mask is not that of whole texts.
    """
    ends, mask = named.get(_LENGTHS), named.get(_MASK)
    if ends is not None:
        lengths: Tensor = ends.diff().long()
        return lengths
    tokens = hidden.shape[1]
    if mask is None:
        return torch.full((len(hidden),), tokens)
    if mask.shape != (1, 1, tokens, tokens) or not mask.is_floating_point():
        raise Unserved(f"the encoder's layers have a mask of shape {tuple(mask.shape)}")
    begins = torch.ones(tokens, dtype=torch.bool)
    begins[1:] = mask[0, 0].diagonal(-1) != 0
    numbers = begins.cumsum(0)
    if not torch.equal(mask[0, 0] == 0, numbers[:, None] == numbers):
        raise Unserved("the encoder's layers have a mask that divides no texts")
    return numbers.bincount()[1:]


def plan_layers(config: Any, layers: Sequence[nn.Module], quantized: bool) -> tuple[LayersPlan, BuiltPlan]:
    """Returns the plan of consecutive layers of an encoder.

    Args:
        config: the encoder's.
        layers: see `EncoderLayers`.
        quantized: whether linear layers of them are quantized.

    Raises:
        CaptureError: they have none.
    """
    module = EncoderLayers(config, layers)
    built = build_plan(kind_of(module.eval()), quantized, None)
    if not built.looks_ahead:
        raise CaptureError("its tokens do not attend to later ones")
    try:
        return LayersPlan(module, built), built
    except ValueError as error:
        raise CaptureError(str(error)) from error
