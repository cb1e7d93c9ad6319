"""Arguments that a base model is given beside token ids and positions, as markers in its graph."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_armllm.capture.markers.encoder_states
import torch_armllm.capture.markers.token_types  # noqa: F401  (both register their markers)
from torch_armllm.hf.model_kind import ModelKind


def step_arguments(kind: ModelKind, input_ids: Tensor) -> dict[str, Tensor]:
    """Returns further arguments of the base model; outside of a step they are samples.

    Args:
        kind: of the model.
        input_ids: int64 ``(1, T)``.
    """
    found: dict[str, Tensor] = {}
    if kind.token_input is not None:
        given = torch.ops.armllm.token_types(input_ids, kind.token_input.count)
        found[kind.token_input.argument] = given
    if kind.attends_to_encoder:
        columns, dtype = kind.base.get_input_embeddings().embedding_dim, next(kind.base.parameters()).dtype
        found["encoder_hidden_states"] = torch.ops.armllm.encoder_states(input_ids, columns, dtype)
    return found
