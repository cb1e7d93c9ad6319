"""Engines with draft layers: their settings, loaders and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import torch_armllm
from torch_armllm.checkpoint.load import load_model
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.speculative.hidden_states import HiddenStateProposer

MTP = {"method": "mtp", "num_speculative_tokens": 3}
EAGLE_LAYERS = 6
TIMES = ", layers: "
SEVERAL = [f"{family}{TIMES}2" for family in ("deepseek_v3", "glm4_moe")]
"""Families with two layers for multi-token prediction."""


def loaded(folder: Path, quantization: str | None = "int4") -> Any:
    model = load_model(str(folder), torch.float32)
    torch_armllm.patch(model, quantization, progress=False)
    return model


def drafter_of(engine: LLMEngine) -> HiddenStateProposer:
    decoder = engine.speculative_decoder
    assert decoder is not None and isinstance(decoder.proposer, HiddenStateProposer)
    return decoder.proposer


def sampled(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "logprobs": 1, "seed": 7, **settings})


def accepted(engine: LLMEngine) -> tuple[int, int]:
    assert engine.speculative_decoder is not None
    acceptance = engine.speculative_decoder.acceptance
    return acceptance.drafted, acceptance.accepted
