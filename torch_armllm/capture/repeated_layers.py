"""Check of layers that run several times: each time has keys of its own in the model's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.capture.sample import STEPS, sample_ids
from torch_armllm.hf.cache_names import cache_argument, cache_of
from torch_armllm.hf.model_kind import ModelKind

_NAME = "armllm_keys"


class _Recorder:
    """Stands for attention: keeps the keys of each call, and returns the values of its queries' tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.keys: list[Tensor] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        if query.shape[2] == self.tokens:
            self.keys.append(key)
            own = value[:, :, -self.tokens :]
        else:  # attention of each token to rows of its own
            own = value[:, :, -1:].expand(-1, -1, query.shape[2], -1)
        return own.repeat_interleave(query.shape[1] // own.shape[1], 1).transpose(1, 2).contiguous(), None

    def run(self, base: nn.Module, ids: Tensor, **cache: Any) -> Any:
        """Computes a step and returns its output; `keys` are those of the step."""
        self.tokens, self.keys = ids.shape[1], []
        return base(input_ids=ids, use_cache=True, return_dict=True, **cache)


@contextmanager
def _recording(base: nn.Module) -> Iterator[_Recorder]:
    from transformers import AttentionInterface

    recorder = _Recorder()
    AttentionInterface.register(_NAME, recorder)
    configs: dict[int, Any] = {id(m.config): m.config for m in base.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = _NAME
        yield recorder
    finally:
        for config, name in before:
            config._attn_implementation = name


@torch.no_grad()
def each_time_has_keys(kind: ModelKind, times: int) -> bool:
    """True if every call of attention finds, in a later step, the keys that it had in the step before.

    A model may let the first runs of a layer read what its last run has written.  What it computes then
    depends on how a text is divided into steps.

    Args:
        kind: of a model with layers that run several times.
        times: calls of attention in a step.
    """
    prompt, chunk = STEPS[:2]
    ids = sample_ids(kind.vocab_size, prompt + chunk)
    with _recording(kind.base) as recorder:
        out = recorder.run(kind.base, ids[:, :prompt])
        last = [key[:, :, -1].clone() for key in recorder.keys]
        recorder.run(kind.base, ids[:, prompt:], **{cache_argument(kind.base.forward): cache_of(out)})
        found = [key[:, :, -chunk - 1] for key in recorder.keys if key.shape[2] > chunk]
    return len(last) == len(found) == times and all(map(torch.equal, last, found))
