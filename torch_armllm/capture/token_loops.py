"""Search for the module that keeps a model from one graph for all lengths: its code loops over the tokens."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_LENGTHS = (5, 13)


class _OpsByModule(TorchDispatchMode):
    """Counts the operators that each module runs, without those of the modules that it calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = [""]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[self.running[-1]] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def following(self, base: nn.Module) -> Iterator[None]:
        """Keeps the name of the running module up to date while the context lasts."""

        def leave(*_: Any) -> None:
            self.running.pop()

        hooks = []
        for name, module in base.named_modules():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
            hooks += [before, module.register_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _count_ops(base: nn.Module, length: int) -> Counter[str]:
    ids = torch.zeros(1, length, dtype=torch.long)
    ops = _OpsByModule()
    with ops.following(base), ops:
        base(input_ids=ids, use_cache=False)
    return ops.counts


@torch.no_grad()
def length_dependence(base: nn.Module) -> str | None:
    """Returns a sentence that names the module that loops over tokens or mixes them; None if none does."""
    try:
        # RWKV changes its weights in its first call.
        _, short, long = (_count_ops(base, length) for length in (_LENGTHS[0], *_LENGTHS))
    except Exception:  # noqa: BLE001 - the model needs other arguments
        return None
    modules = dict(base.named_modules())
    for name, count in short.items():
        if long[name] != count:
            kind = type(modules[name]).__name__
            where = f"{name} ({kind})" if name else kind
            return f"{where} loops over the tokens, and no fused op stands for its loop"
    for name, module in modules.items():
        if isinstance(module, nn.Conv1d) and module.groups != module.in_channels:
            return (
                f"{name} (Conv1d) mixes tokens and channels, which no fused op does: causal_conv mixes the "
                "tokens of each channel on its own"
            )
    return None
