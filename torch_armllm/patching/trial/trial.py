"""The trial itself: each way in which users call a model, on the finished model."""

from __future__ import annotations

import torch

from torch_armllm.patching.forwards.calls import Calls
from torch_armllm.patching.forwards.forward import PatchedForward
from torch_armllm.patching.install import Installed
from torch_armllm.patching.trial.judge import Judge
from torch_armllm.patching.trial.stack_ways import StackWays
from torch_armllm.patching.trial.text_ways import TextWays
from torch_armllm.patching.trial.token_ways import NEW, TokenWays
from torch_armllm.patching.trial.undisturbed import undisturbed

_LEAST, _MOST = 0.02, 0.5
"""Bounds of the error that is no fault.  A lost context or another position makes it about 1; INT4 weights of
SmolLM2 0.1, and 0.3 in a token."""


def fault_of(installed: Installed) -> str | None:
    """Returns what a patched model computes otherwise by its plan than by its modules; None if nothing.

    A few tokens are enough: hidden states of prompts and steps were compared before, see `build_plan`.  What
    is tried here is all between users and the plan: outputs, caches by each of their names, masks, and
    ``generate``, which change from release to release of transformers.

    Args:
        installed: what the model computes with.
    """
    kind, forward = installed.kind, installed.forward
    if kind.prompts_look_ahead:  # runs modules
        return None
    patched: list[PatchedForward[Calls]] = [forward]
    if installed.encoder is not None:
        patched.append(installed.encoder)
    bound = min(max(_LEAST, 2 * installed.rounding), _MOST)
    judge = Judge(kind.name, patched, bound)
    ways: TokenWays | TextWays
    if kind.has_two_stacks:
        ways = StackWays(kind, judge)
    elif kind.predicts_tokens:
        # INT4 keys and values may change results by as much as a fault does, which a note says
        ways = TokenWays(kind, judge, by_modules=forward.shape.dtype != torch.uint8)
    else:
        ways = TextWays(kind, judge)
    with undisturbed(kind.model, patched, NEW):
        return next((fault for fault in ways.faults() if fault is not None), None)
