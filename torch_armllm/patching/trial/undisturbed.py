"""A context in which a model may be called without a trace: no message, no random number."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from torch_armllm.patching.forwards.calls import Calls
from torch_armllm.patching.forwards.forward import PatchedForward

_LOGGER = "transformers"


@contextmanager
def undisturbed(model: Any, patched: Sequence[PatchedForward[Calls]], new_tokens: int) -> Iterator[None]:
    """Lets a trial call a patched model while the context lasts.

    Messages that are shown once are neither shown nor used up, and random numbers go on as without it.

    Args:
        model: a patched model.
        patched: its replaced forwards.
        new_tokens: what ``generate`` computes by default then, greedily and without other settings.
    """
    warned = [set(each._warned) for each in patched]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_silent_thread())
        stack.enter_context(_plain_generation(model, new_tokens))
        try:
            yield
        finally:
            for each, before in zip(patched, warned, strict=True):
                each._warned = before


@contextmanager
def _silent_thread() -> Iterator[None]:
    """Drops what this thread logs by transformers' logger."""
    thread, logger = threading.get_ident(), logging.getLogger(_LOGGER)
    once: Any = getattr(logging.Logger, "warning_once", None)  # transformers adds it; it remembers its calls

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    def warning_once(self: logging.Logger, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            once(self, *args, **kwargs)

    handlers = list(logger.handlers)
    for handler in handlers:
        handler.addFilter(is_other)
    if once is not None:
        logging.Logger.warning_once = warning_once  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if once is not None:
            logging.Logger.warning_once = once  # type: ignore[attr-defined]
        for handler in handlers:
            handler.removeFilter(is_other)


@contextmanager
def _plain_generation(model: Any, new_tokens: int) -> Iterator[None]:
    """Replaces the settings of ``generate``: a checkpoint's may sample, stop, or forbid tokens."""
    if "generation_config" not in model.__dict__:
        yield
        return
    before = model.generation_config
    model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        bos_token_id=before.bos_token_id,
        decoder_start_token_id=before.decoder_start_token_id,
        use_cache=True,
    )
    try:
        yield
    finally:
        model.generation_config = before
