"""Model → one ATen graph on packed tokens."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_armllm.capture.layer_reuse import Folded, NotAlike
from torch_armllm.capture.markers import attention, experts, indexer, mla, sdpa
from torch_armllm.capture.token_mixing import tokens_meet
from torch_armllm.hf.base_model import body_of, first_position_of
from torch_armllm.system.exclusive import TURNS


class CaptureError(RuntimeError):
    """The model cannot be captured; the message says why."""


@dataclass
class Captured:
    """A model's body as a graph.

    The graph takes ``input_ids`` and ``position_ids``, both ``(1, T)`` int64, and returns the last hidden
    state ``(1, T, hidden)``.  Weights are attributes of the graph module that share memory with the model's.
    """

    graph_module: fx.GraphModule
    names: dict[str, str] = field(default_factory=dict)
    """Attribute of the graph module → fully qualified name in the base model."""
    calls_again: bool = False
    """Whether a layer attends several times to the same keys; each time has a cache layer of its own."""


class _Body(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden: Tensor = self.base(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True
        ).last_hidden_state
        return hidden


@contextlib.contextmanager
def _seams(model: nn.Module, implementation: str) -> Iterator[None]:
    attention.register()
    indexer.register()
    experts.register()
    found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    configs = found.values()
    before = [(c, c._attn_implementation, getattr(c, "_experts_implementation", None)) for c in configs]
    try:
        for config, _, _ in before:
            config._attn_implementation = implementation
            config._experts_implementation = experts.IMPLEMENTATION
        with (
            mla.latents_left_in_graph(model),
            experts.batched_left_in_graph(model),
            indexer.left_out(model),
        ):
            yield
    finally:
        for config, attn, expert in before:
            config._attn_implementation = attn
            config._experts_implementation = expert


def _vocabulary(base: nn.Module) -> int:
    try:
        table: Any = base.get_input_embeddings()  # type: ignore[operator]
        return int(table.num_embeddings)
    except (NotImplementedError, AttributeError):
        raise CaptureError(f"{type(base).__name__} has no token embedding of its own") from None


def _attentions(captured: Captured) -> list[Any]:
    """The layer of each attention."""
    nodes = captured.graph_module.graph.nodes
    return [n.args[3] for n in nodes if n.target is torch.ops.armllm.attention.default]


@torch.no_grad()
def _compare(base: nn.Module, captured: Captured) -> None:
    """Refuses a graph that lost what the model does by itself: ALiBi in its masks, positions of its own."""
    ids = torch.arange(3, 9)[None] % _vocabulary(base)
    positions = first_position_of(base) + torch.arange(6)[None]
    wanted = base(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state.float()
    apart = (captured.graph_module(ids, positions).float() - wanted).abs().amax(-1).flatten()
    # rounding may send a few tokens to other experts
    if int((apart > 0.1 * wanted.abs().max()).sum()) > 3:
        raise CaptureError(f"{type(base).__name__} counts positions or masks attention in a way of its own")


def _check_attentions(base: nn.Module, captured: Captured) -> None:
    layers = _attentions(captured)
    kind = type(base).__name__
    if not layers:
        raise CaptureError(f"{kind} does not use transformers' attention interface")
    if len(set(layers)) != len(layers):
        nodes = [
            n for n in captured.graph_module.graph.nodes if n.target is torch.ops.armllm.attention.default
        ]
        if len({(n.args[3], n.args[1]) for n in nodes}) != len(set(layers)):
            raise CaptureError(f"{kind} runs one layer several times")
        captured.calls_again = True
        for number, node in enumerate(nodes):
            node.update_arg(3, number)
        captured.graph_module.recompile()


def _check_tokens(base: nn.Module, captured: Captured) -> None:
    if tokens_meet(captured.graph_module, _vocabulary(base)):
        raise CaptureError(f"{type(base).__name__} mixes or counts tokens outside of its attention")


def weights_as_attributes(program: torch.export.ExportedProgram) -> Captured:
    """Turns an exported program of one result into a graph module that holds its weights as attributes."""
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
    output.args = (output.args[0][0],)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.target = node.name
    graph.set_codegen(fx.graph.CodeGen())
    graph.lint()
    return Captured(fx.GraphModule(module, graph), names)


def capture(model: nn.Module) -> Captured:
    """Exports the body of a causal language model (``model.base_model``) on packed tokens of dynamic length.

    Args:
        model: a transformers model in evaluation mode, float or quantized.

    Returns:
        The graph, with attention and experts as the marker ops of ``torch_armllm.hf``.

    Raises:
        CaptureError: the model cannot be exported, with the exporter's own reason.
    """
    base = body_of(model)
    with TURNS.alone():  # tracing patches what all modules of this process are called by
        captured = _exported(base)
    _check_attentions(base, captured)
    _compare(base, captured)
    return captured


def _exported(base: nn.Module) -> Captured:
    if sdpa.calls_it(base):
        with sdpa.marked():
            captured = _export(base, sdpa.IMPLEMENTATION)
        _check_tokens(base, captured)
    else:
        try:
            captured = _export_each_kind_of_layer(base)
        except NotAlike:
            captured = _export(base, _implementation(base))
            _check_tokens(base, captured)
    return captured


def _export_each_kind_of_layer(base: nn.Module) -> Captured:
    """The same graph as exporting every layer gives, in a fraction of the time."""
    folded = Folded(base)
    with folded.fold():
        captured = _export(base, _implementation(base))
    _check_tokens(base, captured)
    folded.unfold(captured.graph_module, captured.names)
    return captured


def _implementation(base: nn.Module) -> str:
    return indexer.IMPLEMENTATION if indexer.indexers_of(base) else attention.IMPLEMENTATION


def _export(base: nn.Module, implementation: str) -> Captured:
    tokens = torch.export.Dim("tokens", min=2, max=1 << 24)
    ids = torch.zeros(1, 7, dtype=torch.long)
    positions = torch.arange(7)[None]
    try:
        with torch.no_grad(), _seams(base, implementation), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                _Body(base), (ids, positions), dynamic_shapes=({1: tokens}, {1: tokens}), strict=False
            )
    except NotAlike:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CaptureError(f"{type(error).__name__}: {reason[0] if reason else ''}") from error
    return weights_as_attributes(program)
