"""``torch.compile(model, backend="armllm")``: runs the passes on the graphs that Dynamo captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_armllm.ops.linear import SCHEMES
from torch_armllm.passes import PassContext, run_passes
from torch_armllm.passes.lib.graph import fake_mode
from torch_armllm.patching.checked_graph import CheckedGraph
from torch_armllm.quant.schemes.registry import DEFAULT

_SCHEMES = {"int4": DEFAULT, **{name: name for name in SCHEMES if name != "i8"}}


def _scheme(options: dict[str, Any]) -> str | None:
    unknown = sorted(options.keys() - {"quantization", "check"})
    if unknown:
        raise ValueError(
            f"unknown options {unknown}; backend 'armllm' has the options 'quantization' and 'check'"
        )
    quantization = options.get("quantization")
    if quantization is not None and quantization not in _SCHEMES:
        raise ValueError(f"unknown scheme {quantization!r}; choose one of {', '.join(_SCHEMES)}")
    return _SCHEMES[quantization] if quantization is not None else None


def _is_weight(placeholder: fx.Node, example: Any) -> bool:
    static = placeholder.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return isinstance(example, nn.Parameter) or (isinstance(example, torch.Tensor) and static is not None)


def _bind(traced: fx.GraphModule, weights: dict[int, torch.Tensor]) -> None:
    """Converts the inputs that are weights to attributes, so that passes can read and merge them."""
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for index, weight in weights.items():
        node = placeholders[index]
        name = f"w_{node.name}"
        traced.register_buffer(name, weight.detach())
        with traced.graph.inserting_before(node):
            constant = traced.graph.get_attr(name)
        constant.meta["val"] = fake_mode(node).from_tensor(weight.detach(), static_shapes=True)
        node.replace_all_uses_with(constant)
        traced.graph.erase_node(node)
    traced.recompile()


def armllm(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None, **more: Any
) -> Callable[..., Any]:
    """Lowers a Dynamo graph to ATen, runs the passes on it, and returns a callable.

    Attention keeps its own cache; everything else is fused as in a patched model.  A graph that needs
    gradients is not changed.  Weights become constants of the graph.  Quantized and merged weights are
    copies: later changes of the model's weights do not affect them.

    Args:
        module: the graph that Dynamo captured.
        example_inputs: its inputs, real or fake.
        options: ``quantization``: ``"int4"`` or the name of a scheme for float weights; by default they stay
            float.  ``check``: True to compare every call with the graph before the passes, which doubles the
            time; a call that differs returns the original's results and warns with the name of the pass.
        more: options as keywords.

    Raises:
        ValueError: an option or a scheme is unknown.
    """
    options = {**(options or {}), **more}
    scheme = _scheme(options)
    needs_grad = any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    if torch.is_grad_enabled() and needs_grad:
        return module.forward
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    weights = {
        index: example
        for index, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True))
        if _is_weight(node, example)
    }
    # Dynamo's own fake tensors know which sizes are dynamic
    fakes = [node.meta.get("example_value", x) for node, x in zip(placeholders, example_inputs, strict=True)]
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)]
    with modes[0] if modes else nullcontext():
        traced: fx.GraphModule = make_fx(module, pre_dispatch=True)(*fakes)
    _bind(traced, weights)
    context = PassContext(paged=False, scheme=scheme)
    graph: Callable[..., Any]
    if options.get("check"):
        graph = CheckedGraph(traced, context)
    else:
        run_passes(traced, context)
        graph = traced
    remaining = [index for index in range(len(placeholders)) if index not in weights]

    def run(*inputs: Any) -> Any:
        return graph(*(inputs[index] for index in remaining))

    return run
