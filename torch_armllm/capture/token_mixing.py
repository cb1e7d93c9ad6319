"""Does a captured graph let tokens meet in attention alone?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_POSITIONS = (5, 0, 17, 3, 11, 2)
_SOME = (4, 2, 0, 3)


def _stand_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What looks like attention and takes of queries, keys and values those of the token itself only."""
    groups = q.shape[1] // k.shape[1]
    steep = torch.linspace(0.5, 1.5, q.shape[-1], dtype=torch.float32)
    share = torch.sigmoid((q.float() * steep).mean(-1, keepdim=True))
    share = share * torch.sigmoid((k.float() * steep).mean(-1, keepdim=True)).repeat_interleave(groups, 1)
    return (share * v.float().repeat_interleave(groups, 1)).to(q.dtype).transpose(1, 2).contiguous()


class _WithoutAttention(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.armllm.attention.default:
            return _stand_in(*args[:3])
        return super().call_function(target, args, kwargs)


@torch.no_grad()
def tokens_meet(module: fx.GraphModule, vocabulary: int) -> bool:
    """Whether tokens see one another, or how many they are, outside of the attention markers.

    A step packs tokens of many sequences, and of each only those that are new.  A convolution over tokens, a
    recurrent state, or positions that are counted instead of given would be wrong in it.  So the graph is run
    with a stand-in for attention that mixes nothing: its tokens must then give the same in another order and
    without one another.

    Args:
        module: a captured graph of ``input_ids`` and ``position_ids``.
        vocabulary: number of token ids.
    """
    ids = torch.arange(3, 3 + 7 * len(_POSITIONS), 7)[None] % vocabulary
    positions = torch.tensor(_POSITIONS)[None]
    some = torch.tensor(_SOME)
    run = _WithoutAttention(module, garbage_collect_values=True)
    whole: Tensor = run.run(ids, positions)[:, some]
    alone: Tensor = run.run(ids[:, some], positions[:, some])
    bound = _TOLERANCE.get(whole.dtype, 3e-2) * float(whole.float().abs().max())
    # Rounding may send one token to another expert; what mixes tokens does not stop at one.
    apart = (whole.float() - alone.float()).abs().amax(-1).flatten() > bound
    return int(apart.sum()) > 1
