"""Exports a model as one ATen graph on packed tokens."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.counted_positions import use_position_ids
from torch_armllm.capture.eager_attention import IMPLEMENTATION as EAGER
from torch_armllm.capture.eager_attention import mark_attention, number_layers
from torch_armllm.capture.export_errors import export_reason, length_limit
from torch_armllm.capture.layer_reuse import LayerReuse, LayersDiffer
from torch_armllm.capture.markers import (
    attention,
    compression,
    distance_bias,
    experts,
    indexer,
    masks,
    mla,
    recurrent,
    recurrent_modules,
    relative_bias,
    sdpa,
)
from torch_armllm.capture.markers.block_selection import mark_block_selections
from torch_armllm.capture.markers.recurrent_ops import markers_of
from torch_armllm.capture.markers.selection import UnknownSelection, check_selections, mark_selections
from torch_armllm.capture.markers.selection_limits import limit_selections, limited_markers
from torch_armllm.capture.output_check import compare_outputs
from torch_armllm.capture.probing import module_name
from torch_armllm.capture.repeated_layers import each_time_has_keys
from torch_armllm.capture.sample import STEPS, Sample, sample_ids
from torch_armllm.capture.step_inputs import step_arguments
from torch_armllm.capture.token_loops import length_dependence
from torch_armllm.capture.token_mixing import first_mixing_node, mixes_tokens
from torch_armllm.capture.tracing_memory import forget_inputs
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.ops.op_call import OpCall
from torch_armllm.system.exclusive import PROCESS_LOCK

_MOST_TOKENS = 1 << 24
_FEWEST_TOKENS = 256
"""A graph that computes shorter texts only is of little use."""
_FEW, _FEW_TOKENS = 6, 2
"""Tokens, or blocks and their tokens, that indexers select while they are compared with their markers: fewer
than the sample has."""


class CaptureError(RuntimeError):
    """The model cannot be captured; the message states the reason."""


class KeysOfOtherTimes(CaptureError):
    """A layer that runs several times reads keys that another time has written."""


class ShorterTextsOnly(CaptureError):
    """The model chooses other operators for texts of more than ``most_tokens`` tokens."""

    def __init__(self, message: str, most_tokens: int) -> None:
        super().__init__(message)
        self.most_tokens = most_tokens


@dataclass
class CapturedGraph:
    """A base model as a graph.

    Inputs are ``input_ids`` and ``position_ids``, both ``(1, T)`` int64; the output is the last hidden state
    ``(1, T, hidden)``.  Weights are attributes of the graph module that share memory with the model's.
    """

    graph_module: fx.GraphModule
    names: dict[str, str] = field(default_factory=dict)
    """Attribute of the graph module → fully qualified name in the base model."""
    sample: Sample | None = None
    """Results of the graph as it was captured; None before they are checked."""
    has_other_cache: bool = False
    """True if the model's modules cannot read what the graph caches.  A layer that runs several times, or
    attends several times to the same keys, has several cache layers, and keys may have an element for their
    bias."""
    most_tokens: int | None = None
    """Most tokens of a sequence that it computes: it lacks the model's indexers, or longer texts run other
    operators; None: any number."""
    length_reason: str = ""
    """Sentence that says why, if longer texts run other operators."""


class _BaseForward(nn.Module):
    def __init__(self, kind: ModelKind) -> None:
        super().__init__()
        self.base = kind.base
        self._kind = kind

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden: Tensor = self.base(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            return_dict=True,
            **step_arguments(self._kind, input_ids),
        ).last_hidden_state
        return hidden


@contextlib.contextmanager
def _capture_hooks(model: nn.Module, implementation: str) -> Iterator[None]:
    selects = implementation == indexer.SELECTING
    attention.register()
    indexer.register()
    experts.register()
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [
        (c, c._attn_implementation, getattr(c, "_experts_implementation", None)) for c in configs.values()
    ]
    try:
        for config, _, _ in before:
            config._attn_implementation = implementation
            config._experts_implementation = experts.IMPLEMENTATION
        with (
            mla.mark_expand_kv(model),
            distance_bias.mark_distance_biases(model),
            relative_bias.mark_relative_biases(model),
            experts.mark_undecorated_experts(model),
            # a number of selected tokens that no sequence falls below
            limit_selections(indexer.find_indexers(model), 1, 1)
            if selects
            else indexer.disable_indexers(model),
            recurrent.mark_recurrences(model),
            recurrent_modules.mark_recurrent_modules(model),
            compression.mark_compressors(model),
        ):
            yield
    finally:
        for config, attn, expert in before:
            config._attn_implementation = attn
            config._experts_implementation = expert


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Keeps torch from recording the Python lines of each node, a seventh of the time of an export."""
    name = "do_not_emit_stack_traces"
    config: Any = getattr(fx, "config", None)
    before = getattr(config, name, None)
    if before is None:  # an older torch
        yield
        return
    setattr(config, name, True)
    try:
        yield
    finally:
        setattr(config, name, before)


@contextlib.contextmanager
def _without_pooler(base: nn.Module) -> Iterator[None]:
    """Leaves out an encoder's pooler, whose result is no part of the graph."""
    pooler = base._modules.get("pooler")
    if pooler is not None:
        base._modules["pooler"] = None
    try:
        yield
    finally:
        if pooler is not None:
            base._modules["pooler"] = pooler


@contextlib.contextmanager
def _causal_prompts(kind: ModelKind) -> Iterator[None]:
    """Makes attention causal, as after a prompt, in models whose prompts attend to their later tokens."""
    modules = kind.base.language_model.modules() if kind.prompts_look_ahead else ()
    changed = [m for m in modules if getattr(m, "is_causal", True) is False]
    try:
        for module in changed:
            module.is_causal = True
        yield
    finally:
        for module in changed:
            module.is_causal = False


def _vocab_size(kind: ModelKind) -> int:
    try:
        return kind.vocab_size
    except (NotImplementedError, AttributeError):
        name = type(kind.base).__name__
        raise CaptureError(f"{name} has no token embedding, which capture needs") from None


def _attention_layers(captured: CapturedGraph) -> list[Any]:
    """Returns the layer number of each attention."""
    nodes = captured.graph_module.graph.nodes
    return [OpCall(n).layer for n in nodes if n.target is torch.ops.armllm.attention.default]


def _check_outputs(kind: ModelKind, captured: CapturedGraph) -> None:
    first, limit = kind.first_position, kind.position_limit
    limits = (kind.chunk_size, captured.most_tokens, limit and limit - first)
    ids = sample_ids(_vocab_size(kind), min([sum(STEPS), *(n for n in limits if n)]))
    positions = first + torch.arange(ids.shape[1])[None]
    captured.sample = compare_outputs(kind, captured.graph_module, ids, positions)
    if captured.sample is None:
        raise CaptureError(f"{type(kind.base).__name__} computes its own positions or attention masks")
    if attention.attentions_ahead(captured.graph_module):  # no token is computed before the later ones
        captured.sample = replace(captured.sample, steps=(ids.shape[1],))


def _check_attentions(kind: ModelKind, captured: CapturedGraph) -> bool:
    """Numbers the attentions where modules do not.

    Returns:
        True if their results have to be compared with the modules', which may compute attention otherwise.

    Raises:
        CaptureError: there is none, or layers that run several times share a cache layer.
    """
    unsure = bool(attention.attentions_ahead(captured.graph_module))  # a causal mask may contradict that
    unsure |= attention.UNNUMBERED in _attention_layers(captured)
    if unsure:
        number_layers(captured.graph_module)
    layers = _attention_layers(captured)
    name = type(kind.base).__name__
    if not layers and not markers_of(captured.graph_module):
        raise CaptureError(f"{name} does not use transformers' attention interface")
    if len(set(layers)) != len(layers):  # each time that a layer runs has keys, and a cache layer, of its own
        nodes = [
            n for n in captured.graph_module.graph.nodes if n.target is torch.ops.armllm.attention.default
        ]
        again = len({(OpCall(n).layer, OpCall(n).k) for n in nodes}) != len(set(layers))
        if again and not each_time_has_keys(kind, len(nodes)):
            raise KeysOfOtherTimes(f"{name} runs one layer several times, and not each has keys of its own")
        captured.has_other_cache = True
        for number, node in enumerate(nodes):
            OpCall(node).replace(layer=number)
        captured.graph_module.recompile()
    return unsure


def _check_tokens(kind: ModelKind, captured: CapturedGraph) -> None:
    if mixes_tokens(captured.graph_module, _vocab_size(kind)):
        node = first_mixing_node(captured.graph_module, _vocab_size(kind))
        place = type(kind.base).__name__ if node is None else module_name(node)
        raise CaptureError(f"{place} mixes or counts tokens outside of attention")


def weights_as_attributes(program: torch.export.ExportedProgram) -> CapturedGraph:
    """Converts an exported program with one output to a graph module that holds its weights as attributes."""
    module = program.graph_module
    graph = module.graph
    signature = program.graph_signature
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted.update(signature.inputs_to_lifted_tensor_constants)
    tensors = {**program.constants, **program.state_dict}
    names: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.op != "placeholder" or node.name not in lifted:
            continue
        qualified = lifted[node.name]
        attribute = "c_" + qualified.replace(".", "_")
        module.register_buffer(attribute, tensors[qualified].detach())
        names[attribute] = qualified.removeprefix("base.")
        with graph.inserting_before(node):
            constant = graph.get_attr(attribute)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.erase_node(node)
    output = next(n for n in graph.nodes if n.op == "output")
    ((result, *_),) = output.args
    output.args = (result,)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.target = node.name
    graph.set_codegen(fx.graph.CodeGen())
    graph.lint()
    return CapturedGraph(fx.GraphModule(module, graph), names)


def capture(kind: ModelKind) -> CapturedGraph:
    """Exports the base model of a causal language model on packed tokens of dynamic length.

    Args:
        kind: of a transformers model in evaluation mode, float or quantized.

    Returns:
        The graph, with attention and experts as the ops of ``torch_armllm.capture.markers``.

    Raises:
        CaptureError: the model cannot be exported; the message holds the exporter's reason.
    """
    is_checked = False
    with _causal_prompts(kind):
        with PROCESS_LOCK.exclusive():  # tracing patches nn.Module.__call__ for the whole process
            try:
                captured = _exported(kind)
                if _check_attentions(kind, captured):
                    _check_outputs(kind, captured)
                    is_checked = True
            except KeysOfOtherTimes:
                raise
            except CaptureError as error:
                captured = _exported_with_own_attention(kind, error)
        if not is_checked:  # a check with limited selections is none: its sample is not the model's
            _check_outputs(kind, captured)
    return captured


def _exported(kind: ModelKind) -> CapturedGraph:
    if indexer.selects(kind.base) is not None:
        try:
            return _exported_with_selections(kind)
        except (CaptureError, UnknownSelection):
            pass  # the graph without its indexers serves short sequences
    captured = _exported_without_indexers(kind)
    dense = indexer.max_dense_length(kind.base)
    if dense is not None and (captured.most_tokens is None or dense <= captured.most_tokens):
        captured.most_tokens, captured.length_reason = dense, ""
    return captured


def _exported_with_selections(kind: ModelKind) -> CapturedGraph:
    """Exports a model whose indexers select single tokens, or blocks of them.

    Raises:
        UnknownSelection: they do something else, or no op attends to what they select.
        CaptureError: see `capture`.
    """
    try:
        captured = _export_with_layer_reuse(kind, indexer.SELECTING)
    except LayersDiffer:
        captured = _export(kind, indexer.SELECTING)
        _check_tokens(kind, captured)
    check_selections(captured.graph_module.graph)
    few = (_FEW, _FEW_TOKENS)
    with (
        limit_selections(indexer.find_indexers(kind.base), *few),
        limited_markers(captured.graph_module, *few),
    ):
        _check_outputs(kind, captured)
    return captured


def _exported_without_indexers(kind: ModelKind) -> CapturedGraph:
    try:
        return _exported_for_texts_of(_MOST_TOKENS, kind)
    except ShorterTextsOnly as reason:
        captured = _exported_for_texts_of(reason.most_tokens, kind)
        captured.most_tokens, captured.length_reason = reason.most_tokens, str(reason)
        return captured


def _exported_for_texts_of(most_tokens: int, kind: ModelKind) -> CapturedGraph:
    if sdpa.calls_sdpa(kind.base):
        with sdpa.mark_calls():
            captured = _export(kind, sdpa.IMPLEMENTATION, most_tokens)
        _check_tokens(kind, captured)
    else:
        try:
            captured = _export_with_layer_reuse(kind, _implementation(kind.base), most_tokens)
        except LayersDiffer:
            captured = _export(kind, _implementation(kind.base), most_tokens)
            _check_tokens(kind, captured)
    return captured


def _export_with_layer_reuse(
    kind: ModelKind, implementation: str, most_tokens: int = _MOST_TOKENS
) -> CapturedGraph:
    """Exports one layer of each kind and copies it: the same graph in a fraction of the time."""
    reuse = LayerReuse(kind.base)
    with reuse.export_once():
        captured = _export(kind, implementation, most_tokens)
    _check_tokens(kind, captured)
    reuse.insert_copies(captured.graph_module, captured.names)
    return captured


def _exported_with_own_attention(kind: ModelKind, reason: CaptureError) -> CapturedGraph:
    """Exports a model whose modules compute attention themselves, and recognizes it in the graph."""
    try:
        reuse = LayerReuse(kind.base)
        with reuse.export_once():
            captured = _export_own_attention(kind, reason)
        reuse.insert_copies(captured.graph_module, captured.names)
    except LayersDiffer:
        captured = _export_own_attention(kind, reason)
    number_layers(captured.graph_module)
    return captured


def _export_own_attention(kind: ModelKind, reason: CaptureError) -> CapturedGraph:
    try:
        captured = _export(kind, EAGER, _length_of_masks(kind) - 1)
    except CaptureError:
        raise reason from None
    try:
        marked = mark_attention(captured.graph_module)
    except attention.UnsupportedAttention as error:
        raise CaptureError(str(error)) from None
    if not marked or kind.attends_to_encoder:
        raise reason  # attention to an encoder is recognized by transformers' interface only
    use_position_ids(captured.graph_module, kind.first_position)
    _check_tokens(kind, captured)
    return captured


def _length_of_masks(kind: ModelKind) -> int:
    """Returns the number of positions for which a model may have constant masks and biases."""
    sizes = (kind.position_limit, getattr(kind.base.config, "max_seq_len", None))
    return min([_MOST_TOKENS, *(size for size in sizes if isinstance(size, int))])


def _implementation(base: nn.Module) -> str:
    return indexer.IMPLEMENTATION if indexer.find_indexers(base) else attention.IMPLEMENTATION


def _export(kind: ModelKind, implementation: str, most_tokens: int = _MOST_TOKENS) -> CapturedGraph:
    tokens = torch.export.Dim("tokens", min=2, max=most_tokens)
    selects = indexer.selects(kind.base)
    ids = torch.zeros(1, 7, dtype=torch.long)
    positions = torch.arange(7)[None]
    try:
        with (
            torch.no_grad(),
            _capture_hooks(kind.base, implementation),
            _without_pooler(kind.base),
            _without_stack_traces(),
            masks.record_masks(kind.base) as masked_windows,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            program = torch.export.export(
                _BaseForward(kind), (ids, positions), dynamic_shapes=({1: tokens}, {1: tokens}), strict=False
            )
            longer_keys = distance_bias.resolve_biases(program.graph)
            masked_windows.apply(program.graph)
            if implementation == indexer.SELECTING:
                assert selects is not None
                if selects.span:
                    mark_block_selections(program.graph, selects)
                else:
                    mark_selections(program.graph, selects.count)
    except (LayersDiffer, UnknownSelection):
        raise
    except Exception as error:
        if "Constraints violated" in str(error) and (loop := length_dependence(kind.base)):
            raise CaptureError(loop) from error
        limit = length_limit(error)
        if most_tokens == _MOST_TOKENS and limit is not None and limit >= _FEWEST_TOKENS:
            raise ShorterTextsOnly(export_reason(error, kind.base), limit) from error
        raise CaptureError(export_reason(error, kind.base)) from error
    forget_inputs(program.graph)
    captured = weights_as_attributes(program)
    captured.has_other_cache = longer_keys
    use_position_ids(captured.graph_module, kind.first_position, kind.attends_to_encoder)
    return captured
