"""Numbers of tokens, such as the types of a pair of texts: an input of a step beside the token ids.

Outside of a step they are a fixed function of the ids, as `given_rows` are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_armllm.capture.markers.declare import marker


@marker("token_types(Tensor input_ids, int count) -> Tensor", lambda a: torch.empty_like(a.input_ids))
def sample_types(input_ids: Tensor, count: int) -> Tensor:
    """Returns types ``(1, T)`` that are functions of the token ids ``(1, T)``."""
    return input_ids % count
