"""An embedding that is tied to a quantized head, and stores eight further bits per weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_armllm.ops.embedding import reference_split_embedding, split_embedding
from torch_armllm.quant.modules.linear import QuantLinear
from torch_armllm.quant.schemes.base import op_name

SHARED_SCHEMES = ("int8", "int6")
"""Schemes of heads that an embedding can share."""


def can_share(embedding: nn.Embedding, head: str) -> bool:
    """True if an embedding that is tied to a head of scheme ``head`` can share the head's weights.

    It must be a plain look-up without scaling or renormalization, of a 16-bit dtype: a float32 weight would
    lose too much.
    """
    plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    return plain and head in SHARED_SCHEMES and embedding.weight.dtype in (torch.bfloat16, torch.float16)


class TiedEmbedding(nn.Module):
    """Replaces an ``nn.Embedding`` whose weight is also that of the head.

    The head's INT8 weights and the rest together are 16-bit integers with one scale per row.  They restore
    bfloat16 weights to within 2⁻¹⁶ of the largest weight of the row; with a head of scheme ``int6``, 2⁻¹⁴.

    Attributes:
        weight_packed: the head's own panels.
        rest: int8 ``(num_embeddings, embedding_dim)``.
    """

    weight_packed: Tensor
    rest: Tensor

    def __init__(self, embedding: nn.Embedding, head: QuantLinear) -> None:
        """Leaves ``rest`` on the meta device until it is loaded; the head's weights may be there too."""
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.float_dtype = embedding.weight.dtype
        self.scheme = op_name(head.scheme)
        self.rotated = head.rotated
        self.register_buffer("weight_packed", head.weight_packed, persistent=False)
        self.register_buffer("rest", torch.empty_like(embedding.weight, dtype=torch.int8, device="meta"))
        # In a tuple: shells are no submodules, their parameters are not the model's any more.
        self._shells = (embedding, head.shell)

    def share(self, head: QuantLinear) -> None:
        """Shares the head's weights; to be called once they are loaded."""
        self.weight_packed = head.weight_packed

    @property
    def shell(self) -> nn.Module:
        """The embedding that it replaced."""
        return self._shells[0]

    @property
    def head_shell(self) -> nn.Module | None:
        """The head whose quantized form it shares."""
        return self._shells[1]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Looks up int32 or int64 ids of any shape: ``(*ids.shape, embedding_dim)``."""
        return self.look_up(input_ids)

    def look_up(self, input_ids: Tensor) -> Tensor:
        """See `forward`; hooks are not called."""
        if input_ids.dtype == torch.int32:  # transformers' continuous batching
            input_ids = input_ids.long()
        return split_embedding(
            input_ids, self.weight_packed, self.rest, self.float_dtype, self.scheme, self.rotated
        )

    def dequantize(self) -> Tensor:
        """The whole weight ``(num_embeddings, embedding_dim)`` in its float type."""
        ids = torch.arange(self.num_embeddings)
        return reference_split_embedding(
            ids, self.weight_packed, self.rest, self.float_dtype, self.scheme, self.rotated
        )

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.num_embeddings}, {self.embedding_dim}, tied to the head's weights"
