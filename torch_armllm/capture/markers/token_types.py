"""Token types, such as those of a pair of texts: an input of encoders beside the token ids.

Outside of a step they are a fixed function of the ids, as `given_rows` are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_armllm.capture.markers.given_rows import given_now
from torch_armllm.hf.base_model import type_count_of

_library = torch.library.Library("armllm", "FRAGMENT")
_library.define("token_types(Tensor input_ids, int count) -> Tensor")


def sample_types(input_ids: Tensor, count: int) -> Tensor:
    """Returns types ``(1, T)`` that are functions of the token ids ``(1, T)``."""
    return input_ids % count


def token_types(input_ids: Tensor, count: int) -> Tensor:
    """Returns the types ``(1, T)`` of the step under way, else `sample_types`."""
    given = given_now()
    return sample_types(input_ids, count) if given is None else given.view(1, -1).clone()


def _fake(input_ids: Tensor, count: int) -> Tensor:
    return torch.empty_like(input_ids)


_library.impl("token_types", token_types, "CompositeExplicitAutograd")
torch.library.register_fake("armllm::token_types", _fake, lib=_library)


def type_arguments(base: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Returns the argument of a base model that holds token types; none if it has no such argument."""
    count = type_count_of(base)
    return {"token_type_ids": torch.ops.armllm.token_types(input_ids, count)} if count else {}
