"""Capture of a model, its passes and its plan, checked against the captured graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.export import CapturedGraph, CaptureError, capture
from torch_armllm.capture.markers.attention import attentions_ahead
from torch_armllm.capture.markers.indexer import unknown_selection
from torch_armllm.capture.markers.mla import unsupported_inputs
from torch_armllm.capture.output_check import sample_of_text
from torch_armllm.capture.sample import Sample, sample_ids
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.kv_cache.shapes import Shape, with_cache_dtype
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.stage import Stage
from torch_armllm.passes import PassContext, run_passes
from torch_armllm.passes.lib.adapter_columns import AdapterColumns, adapter_columns
from torch_armllm.passes.lib.cache_layout import cache_layout
from torch_armllm.patching.layer_inputs import append_layer_inputs
from torch_armllm.patching.self_check import OTHER_TEXTS, REQUIRED_PASSES, Texts, find_guilty_pass, tolerance
from torch_armllm.patching.stage_cut import cut_stage
from torch_armllm.plan.infer_cache import cache_shape_of, shape_of_rank
from torch_armllm.plan.make import make_plan
from torch_armllm.plan.native import native_plan
from torch_armllm.plan.sample_steps import plan_error
from torch_armllm.plan.step import Plan

logger = logging.getLogger(__name__)

_MODULES_ABOVE = 0.25
"""A plan whose unexplained error is larger is not used."""
_LARGE_INT4_ERROR = 0.6
"""Error by an INT4 cache that is reported.  SmolLM2 has 0.08 and Gemma 3 0.45: they lose 0.03 and 0.04 nats a
token.  Qwen2.5 has 0.95, and its answers make no sense."""
NODE_BY_NODE = "the graph runs node by node: "
_SLOWER = "; results are the same, steps take longer: please report it with the model's config.json"
_BUG = "please report this as a bug, with the model's config.json"


@dataclass
class BuiltPlan:
    """A plan, and the facts of the model that it was made from.

    Attributes:
        plan: computes a step.
        shape: shape of its KV cache.
        graph: the rewritten graph.
        has_other_cache, most_tokens, length_reason: see `CapturedGraph`.
        looks_ahead: True if tokens attend to later ones: a step computes whole texts.
        rounding: error of its hidden states that is known, and reported if rounding does not explain it.
        notes: remarks for the report.
        adapter_columns: what a rank has of the slots for adapters whose columns are sharded.
    """

    plan: Plan
    shape: Shape
    graph: fx.GraphModule
    has_other_cache: bool
    most_tokens: int | None
    length_reason: str
    looks_ahead: bool
    rounding: float = 0.0
    notes: list[str] = field(default_factory=list)
    adapter_columns: list[AdapterColumns] = field(default_factory=list)


def build_plan(
    kind: ModelKind,
    quantized: bool,
    cache_dtype: torch.dtype | None,
    layer_inputs: Sequence[int] = (),
    group: RankGroup | None = None,
    stage: Stage | None = None,
) -> BuiltPlan:
    """Captures a model and returns a plan that computes what the captured graph computed.

    Where the plan's results differ by more than rounding, the pass that changes them is searched for and left
    out; then native execution is left out.  The notes name both.

    Args:
        kind: of the model.
        quantized: whether layers of it are quantized.
        cache_dtype: dtype of the KV cache; None for the dtype of the keys.
        layer_inputs: numbers of decoder layers whose inputs follow the last hidden state in each row.
        group: tensor parallel ranks that share the layers out; all of them build the plan at the same time.
        stage: of a pipeline, whose layers the plan computes; None: it computes all layers.

    Raises:
        CaptureError: the model cannot be captured, or no plan computes what its graph computed.
    """
    base = kind.base
    if (reason := unknown_selection(base) or unsupported_inputs(base)) is not None:
        raise CaptureError(reason)
    builder = _Builder(kind, cache_dtype, layer_inputs=layer_inputs, group=group, stage=stage)
    captured = builder.capture()
    sample = captured.sample
    assert sample is not None
    dtype = next((p.dtype for p in base.parameters() if p.is_floating_point()), torch.float32)
    built = builder.build(captured)
    builder.strict = dtype == torch.float32 == built.shape.dtype and not quantized
    cache = _checked(built.shape).dtype
    texts = Texts(
        sample,
        lambda each: tolerance(each, dtype, quantized, cache),
        None if builder.strict else lambda: builder.other_samples(sample),
    )
    bound = texts.bound_of(sample)

    def error_of(each: Sample) -> float:
        return _error(each, built, builder.strict)

    while not texts.agree(error := error_of(sample), error_of):
        guilty = builder.find_guilty_pass(texts)
        if guilty is not None and guilty not in REQUIRED_PASSES:
            builder.skip |= {guilty}
            builder.notes.append(
                f"the rewrite {guilty!r} is left out: its hidden states are off by {error:.1g} (relative) "
                f"where rounding explains {bound:.1g}; {_BUG}"
            )
        elif guilty is None and builder.native and native_plan(built.plan) is not None:
            builder.native = False
        elif guilty is None and error < _MODULES_ABOVE:
            builder.native = True
            built = builder.build(builder.capture())
            built.notes.append(
                f"hidden states differ from the model's by {error:.1g} (relative) where rounding explains "
                f"{bound:.1g}, and no rewrite was found to cause it; {_BUG}"
            )
            break
        else:
            where = "the plan" if guilty is None else f"the rewrite {guilty!r}"
            raise CaptureError(
                f"{where} computes other hidden states than the model (relative error {error:.1g}); {_BUG}"
            )
        built = builder.build(builder.capture())
    built.rounding = max(error, bound)
    if built.shape.dtype == torch.uint8:
        lost = plan_error(sample, built.plan, built.shape)
        if not lost <= _LARGE_INT4_ERROR:
            built.notes.append(
                f"INT4 keys and values change its hidden states by {lost:.2g} (relative), INT8 ones by "
                f'{plan_error(sample, built.plan, _checked(built.shape)):.2g}; choose kv_cache_dtype="int8"'
            )
    return built


def _error(sample: Sample, built: BuiltPlan, strict: bool) -> float:
    try:
        return plan_error(sample, built.plan, _checked(built.shape), strict)
    except Exception as error:  # noqa: BLE001 - a plan that does not run is as wrong as one that differs
        logger.info("a plan does not run: %s: %s", type(error).__name__, error)
        return float("inf")


def _checked(shape: Shape) -> Shape:
    """Returns the shape of the cache that a plan is checked with.

    The rounding of an INT4 cache would hide mistakes; the same plan runs on an INT8 cache.
    """
    return with_cache_dtype(shape, torch.int8) if shape.dtype == torch.uint8 else shape


@dataclass
class _Builder:
    """Makes plans of a model's captured graphs, without the passes that it skips."""

    kind: ModelKind
    cache_dtype: torch.dtype | None
    skip: frozenset[str] = frozenset()
    native: bool = True
    strict: bool = False
    notes: list[str] = field(default_factory=list)
    layer_inputs: Sequence[int] = ()
    group: RankGroup | None = None
    stage: Stage | None = None

    def capture(self) -> CapturedGraph:
        """Captures the model, with the inputs of the layers that are asked for, or the layers of a stage."""
        captured = capture(self.kind)
        if self.stage is not None:
            assert captured.sample is not None
            try:
                captured.sample = cut_stage(captured.graph_module, captured.sample, self.stage)
            except ValueError as reason:
                raise CaptureError(str(reason)) from reason
        if self.layer_inputs:
            assert captured.sample is not None
            parts = self.kind, captured.graph_module, captured.sample
            captured.sample = append_layer_inputs(*parts, self.layer_inputs)
            if captured.sample is None:
                raise CaptureError(f"the inputs of its layers {self.layer_inputs} are not in its graph")
        return captured

    def build(self, captured: CapturedGraph) -> BuiltPlan:
        """Rewrites a captured graph, in place, and makes its plan."""
        graph = captured.graph_module
        context = self._context(captured)
        layout = context.layout
        assert layout is not None
        shape = cache_shape_of(self.kind.base, graph, layout, self.cache_dtype)
        looks_ahead = bool(attentions_ahead(graph))
        run_passes(graph, context)
        shape = shape_of_rank(shape, graph, context)
        plan, why_not_native = make_plan(graph, self.native)
        notes = list(self.notes)
        if why_not_native is not None:
            notes.append(f"{NODE_BY_NODE}{why_not_native}{_SLOWER}")
        columns = [replace(each, name=captured.names[each.name]) for each in adapter_columns(graph)]
        return BuiltPlan(
            plan=plan,
            shape=shape,
            graph=graph,
            has_other_cache=captured.has_other_cache,
            most_tokens=captured.most_tokens,
            length_reason=captured.length_reason,
            looks_ahead=looks_ahead,
            notes=notes,
            adapter_columns=columns,
        )

    def other_samples(self, sample: Sample) -> list[Sample]:
        """Captures the model again and returns samples of other texts than a sample's."""
        graph = self.capture().graph_module
        tokens = sample.input_ids.shape[1]
        texts = [sample_ids(self.kind.vocab_size, tokens, seed) for seed in range(1, 1 + OTHER_TEXTS)]
        return [sample_of_text(graph, sample, text) for text in texts]

    def find_guilty_pass(self, texts: Texts) -> str | None:
        """Captures the model again and returns the first pass that changes its results; None if none does."""
        captured = self.capture()

        def is_right(graph: fx.GraphModule) -> bool:
            def error_of(sample: Sample) -> float:
                hidden = graph(sample.input_ids, sample.position_ids)
                return sample.strict_error(hidden) if self.strict else sample.error(hidden)

            return texts.agree(error_of(texts.sample), error_of)

        return find_guilty_pass(captured.graph_module, self._context(captured), is_right)

    def _context(self, captured: CapturedGraph) -> PassContext:
        return PassContext(
            cache_dtype=self.cache_dtype,
            layout=cache_layout(captured.graph_module),
            on_new_weight=_weight_owner(self.kind.base, captured),
            group=self.group,
            skip=self.skip,
        )


def _weight_owner(base: nn.Module, captured: CapturedGraph) -> Callable[[str, Tensor], None]:
    """Returns a function that makes modules use their part of a weight that a pass merged.

    No weight is then stored twice.
    """

    def move(attribute: str, view: Tensor) -> None:
        path, _, name = captured.names[attribute].rpartition(".")
        base.get_submodule(path)._buffers[name] = view

    return move
