"""Layout of the keys and values of an encoder's tokens, which a decoder reads."""

from __future__ import annotations

from torch import fx

from torch_armllm.capture.markers.encoder_states import encoder_attentions
from torch_armllm.ops.op_call import OpCall
from torch_armllm.passes.lib.graph import value


def encoder_sizes(module: fx.GraphModule) -> tuple[int, int, int, int]:
    """Returns the number of a graph's layers that attend to an encoder, their KV heads, head and value size.

    All are 0 if no layer does.

    Raises:
        ValueError: the layers differ in their sizes, or several have the same number.
    """
    nodes = encoder_attentions(module.graph)
    if not nodes:
        return 0, 0, 0, 0
    sizes = set()
    for node in nodes:
        keys, values = value(OpCall(node).k).shape, value(OpCall(node).v).shape
        sizes.add((int(keys[1]), int(keys[3]), int(values[3])))
    if len(sizes) != 1 or sorted(int(OpCall(n).layer) for n in nodes) != list(range(len(nodes))):
        raise ValueError("its layers differ in how they attend to the encoder")
    return (len(nodes), *sizes.pop())
