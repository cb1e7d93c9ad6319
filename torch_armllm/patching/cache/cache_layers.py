"""Layers of a paged cache as transformers' caches have them: keys and values, read and written on demand."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a `PagedCache`.

    Args:
        cache: the cache, which this keeps alive.
        number: of the layer in it.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: Any, number: int) -> None:
        self._cache = cache
        self._number = number

    @property
    def keys(self) -> Tensor | None:
        """A copy of the keys ``(batch, heads, length, size)``, zeros for padding; None without rows."""
        return self._cache.read_dense(self._number)[0] if self.is_initialized else None

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._cache.write_dense(self._number, keys, self._cache.read_dense(self._number)[1])

    @property
    def values(self) -> Tensor | None:
        """A copy of the values, as `keys`."""
        return self._cache.read_dense(self._number)[1] if self.is_initialized else None

    @values.setter
    def values(self, values: Tensor) -> None:
        self._cache.write_dense(self._number, self._cache.read_dense(self._number)[0], values)

    @property
    def is_initialized(self) -> bool:
        """True if the cache has rows."""
        return bool(self._cache.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `keys` and `values`."""
        found: torch.dtype = self._cache.read_dense(self._number)[0].dtype
        return found

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first step."""
        own: int = self._cache.batch_size
        return own

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: memory is allocated from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `PagedCache.update`."""
        own: tuple[Tensor, Tensor] = self._cache.update(key_states, value_states, self._number)
        return own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `PagedCache.get_mask_sizes`."""
        own: tuple[int, int] = self._cache.get_mask_sizes(query_length, self._number)
        return own

    def get_seq_length(self) -> int:
        """See `PagedCache.get_seq_length`."""
        own: int = self._cache.get_seq_length(self._number)
        return own

    def get_max_length(self) -> int:
        """Returns -1: there is no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raises: rows of all layers have one length."""
        self._refuse("crop")

    def reset(self) -> None:
        """Raises, as `crop` does."""
        self._refuse("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raises, as `crop` does."""
        self._refuse("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raises, as `crop` does."""
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raises, as `crop` does."""
        self._refuse("batch_select_indices")

    def _refuse(self, method: str) -> NoReturn:
        raise ValueError(
            f"a layer of a patched model's cache cannot {method} alone: all layers share their rows; call "
            f"{method} of the cache itself"
        )


class StateLayer:
    """A recurrent layer of a patched model, in the list of a cache's layers.

    Its states have the form that kernels read, and are not shown.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a recurrent layer of a patched model's cache has no {name!r}: its states have the form that "
            "kernels read; torch_armllm.unpatch(model) gives a cache with them"
        )
