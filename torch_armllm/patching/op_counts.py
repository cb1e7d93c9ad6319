"""Fused ops of a rewritten graph, by name, for reports."""

from __future__ import annotations

from collections import Counter

from torch import fx


def op_counts(module: fx.GraphModule) -> dict[str, int]:
    """Returns the number of calls of each op, and of float linear layers."""
    counts: Counter[str] = Counter()
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        if schema.name.startswith("armllm::"):
            counts[schema.name.removeprefix("armllm::")] += 1
        elif schema.name == "aten::linear":
            counts["aten.linear"] += 1
    return dict(counts)
