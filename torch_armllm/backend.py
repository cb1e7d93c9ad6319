"""``torch.compile(model, backend="armllm")``: the same passes on the graphs that Dynamo finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_armllm.passes import PassContext, run_passes


def armllm(module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Lowers a Dynamo graph to ATen, runs the passes over it, and returns what runs it.

    Attention keeps its own cache; everything else is fused as in a patched model.  A graph that needs
    gradients is left as it is.

    Args:
        module: the graph that Dynamo captured.
        example_inputs: its inputs, real or fake.
        options: none are known.

    Raises:
        ValueError: an option is given.
    """
    if options:
        raise ValueError(f"backend 'armllm' knows no options; it got {sorted(options)}")
    needs_grad = any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    if torch.is_grad_enabled() and needs_grad:
        return module.forward
    mode = torch._guards.detect_fake_mode(list(example_inputs))
    traced: fx.GraphModule = make_fx(
        module,
        tracing_mode="real" if mode is not None else "symbolic",
        pre_dispatch=True,
        _allow_non_fake_inputs=True,
    )(*example_inputs)
    run_passes(traced, PassContext(paged=False))
    return traced.forward
