"""Loading of replicas: an engine in each of several processes."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.settings.memory_limit import left
from torch_armllm.llm.ranks.network import launched_ranks
from torch_armllm.llm.replicas.replica_set import ReplicaSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def load_replicas(
    request: ModelRequest, config: EngineConfig
) -> tuple[ReplicaSet, PreTrainedTokenizerBase | None]:
    """Starts replicas of a model, and returns them with their tokenizer.

    Args:
        request: what each loads: a folder, with the name of a tokenizer or without.
        config: settings of each engine, and the number of replicas.

    Raises:
        ValueError: a setting or the model does not allow it, or a replica has failed.
    """
    from torch_armllm.checkpoint.load import load_tokenizer  # imports transformers

    count, model, tokenizer = config.data_parallel_size, request.model, request.tokenizer
    if (reason := _refusal(model, tokenizer, config)) is not None:
        raise ValueError(f"data_parallel_size = {count}: {reason}")
    assert isinstance(model, str) and (tokenizer is None or isinstance(tokenizer, str))
    own = None if request.skip_tokenizer_init else load_tokenizer(tokenizer or model)
    # a replica sees its part of the memory that is free now, whenever the others take theirs
    promised = config.promised_memory + left(config) * (count - 1) // count
    each = replace(config, data_parallel_size=1, promised_memory=promised)
    quiet = replace(request, progress=False)
    settings = {field.name: getattr(part, field.name) for part in (quiet, each) for field in fields(part)}
    replicas = ReplicaSet(settings, count, own, each)
    logger.info("data parallel: %d replicas, in processes %s", count, [r.pid for r in replicas.replicas])
    return replicas, own


def _refusal(model: object, tokenizer: object, config: EngineConfig) -> str | None:
    """Returns the reason why a model cannot have replicas; None if it may."""
    if not isinstance(model, str):
        return "each replica loads the model itself: give the folder in place of a loaded model"
    if not (tokenizer is None or isinstance(tokenizer, str)):
        return "each replica loads the tokenizer itself: give the folder in place of a loaded tokenizer"
    if config.scheduling_policy is not None:
        return "a scheduling_policy stays in this process: leave it out"
    if config.trace is not None:
        return "steps of replicas are not traced yet: leave trace out"
    if config.distributed_executor_backend == "ray":
        return (
            "replicas are processes of this machine, and Ray's are those of torch_armllm.serve_ray: run that"
        )
    if launched_ranks() is not None:
        return "torchrun starts ranks, and replicas start themselves: run the program without it"
    return None
