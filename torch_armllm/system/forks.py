"""Computing in forked processes."""

from __future__ import annotations

import os
import warnings

import torch

_prepared = False
_forked = False
_warned = False


def prepare_for_forks() -> None:
    """Makes processes that are forked from now on compute on one thread.

    OpenMP's threads do not exist in a forked process, and an op that shares work with them waits forever.
    """
    global _prepared
    if not _prepared:
        _prepared = True
        os.register_at_fork(after_in_child=_use_one_thread)


def is_forked() -> bool:
    """True in a process that was forked after `prepare_for_forks`."""
    return _forked


def warn_if_forked() -> None:
    """Warns once if the process computes on one thread because it was forked."""
    global _warned
    if _forked and not _warned:
        _warned = True
        warnings.warn(
            "torch_armllm: this process was forked from one that had a model, so it computes on one thread; "
            'start it with multiprocessing.get_context("spawn") and load the model in it to use all cores',
            stacklevel=4,
        )


def _use_one_thread() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)
