"""The part of a captured graph that a stage of a pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import Node

from torch_armllm.capture.markers.given_rows import sample_of
from torch_armllm.capture.sample import Sample
from torch_armllm.parallel.stage import Stage
from torch_armllm.passes.lib.graph import aten, call, keep_results, value
from torch_armllm.passes.lib.stage_bounds import stage_bounds

armllm = torch.ops.armllm


@torch.no_grad()
def cut_stage(module: fx.GraphModule, sample: Sample, stage: Stage) -> Sample:
    """Leaves a stage's nodes in a graph; a stage but the first is given the rows of the one before it.

    Args:
        module: a captured graph, before any pass; it is changed.
        sample: of its results.
        stage: to leave.

    Returns:
        A sample of the stage's own results, for rows that are a function of the token ids.

    Raises:
        ValueError: the graph cannot be cut into so many stages, or is given rows already.
    """
    if sample.given is not None or sample.encoder:
        raise ValueError("it reads more than token ids and positions")
    bounds = stage_bounds(module, stage.count, stage.head_bytes)
    if not stage.is_last:
        _end_with(module, bounds[stage.number].rows)
    if not stage.is_first:
        _begin_with(module, bounds[stage.number - 1].rows)
    keep_results(module.graph)
    _drop_unread(module)
    module.graph.lint()
    module.recompile()
    hidden = module(sample.input_ids, sample.position_ids)[0].float()
    return replace(sample, hidden=hidden, given=sample_of(module, sample.input_ids))


def _end_with(module: fx.GraphModule, rows: Sequence[Node]) -> None:
    """Makes rows the graph's result, side by side."""
    graph = module.graph
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        flat = [n if value(n).dim() == 3 else call(graph, aten.flatten.using_ints, n, 2) for n in rows]
        joined = flat[0] if len(flat) == 1 else call(graph, aten.cat.default, flat, -1)
    output.args = (joined,)


def _begin_with(module: fx.GraphModule, rows: Sequence[Node]) -> None:
    """Makes a graph read rows that it is given, side by side, where it computed them."""
    graph = module.graph
    ids = next(n for n in graph.nodes if n.op == "placeholder" and n.name == "input_ids")
    widths = [int(value(n)[0, 0].numel()) for n in rows]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        given = call(graph, armllm.given_rows.default, ids, sum(widths), value(rows[0]).dtype)
    last, first = given, 0
    for node, width in zip(rows, widths, strict=True):
        part = given
        if len(rows) > 1:
            with graph.inserting_after(last):
                last = part = call(graph, aten.slice.Tensor, given, -1, first, first + width)
        if value(node).dim() > 3:
            with graph.inserting_after(last):
                last = part = call(graph, aten.view.default, part, [1, -1, *value(node).shape[2:]])
        node.replace_all_uses_with(part)
        first += width


def _drop_unread(module: fx.GraphModule) -> None:
    """Removes the weights that no node reads."""
    read = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    for name in [name for name, _ in module.named_buffers(recurse=False) if name not in read]:
        delattr(module, name)
