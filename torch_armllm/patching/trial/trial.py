"""The trial itself: each way in which users call a model, on the finished model."""

from __future__ import annotations

from typing import Any

import torch

from torch_armllm.patching.install import Installed
from torch_armllm.patching.model_kind import has_two_stacks, predicts_tokens
from torch_armllm.patching.prefix_forward import PrefixForward
from torch_armllm.patching.trial.judge import Judge
from torch_armllm.patching.trial.stack_ways import StackWays
from torch_armllm.patching.trial.text_ways import TextWays
from torch_armllm.patching.trial.token_ways import NEW, TokenWays
from torch_armllm.patching.trial.undisturbed import undisturbed

_LEAST, _MOST = 0.02, 0.5
"""Bounds of the error that is no fault.  A lost context or another position makes it about 1; INT4 weights of
SmolLM2 0.1, and 0.3 in a token."""


def fault_of(model: Any, installed: Installed) -> str | None:
    """Returns what a patched model computes otherwise by its plan than by its modules; None if nothing.

    A few tokens are enough: hidden states of prompts and steps were compared before, see `build_plan`.  What
    is tried here is all between users and the plan: outputs, caches by each of their names, masks, and
    ``generate``, which change from release to release of transformers.

    Args:
        model: a patched model.
        installed: what it computes with.
    """
    forward = installed.forward
    if isinstance(forward, PrefixForward):  # runs modules
        return None
    patched = [forward] if installed.encoder is None else [forward, installed.encoder]
    bound = min(max(_LEAST, 2 * installed.rounding), _MOST)
    judge = Judge(type(model).__name__, patched, bound)
    ways: TokenWays | TextWays
    if has_two_stacks(model):
        ways = StackWays(model, judge)
    elif predicts_tokens(model):
        # INT4 keys and values may change results by as much as a fault does, which a note says
        ways = TokenWays(model, judge, by_modules=forward.shape.dtype != torch.uint8)
    else:
        ways = TextWays(model, type(forward.base).__name__, judge)
    with undisturbed(model, patched, NEW):
        return next((fault for fault in ways.faults() if fault is not None), None)
