"""Numbers of tokens, such as the types of a pair of texts: an input of a step beside the token ids.

Outside of a step they are a fixed function of the ids, as `given_rows` are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define("token_types(Tensor input_ids, int count) -> Tensor")


def sample_types(input_ids: Tensor, count: int) -> Tensor:
    """Returns types ``(1, T)`` that are functions of the token ids ``(1, T)``."""
    return input_ids % count


def _fake(input_ids: Tensor, count: int) -> Tensor:
    return torch.empty_like(input_ids)


_library.impl("token_types", sample_types, "CompositeExplicitAutograd")
torch.library.register_fake("armllm::token_types", _fake, lib=_library)
