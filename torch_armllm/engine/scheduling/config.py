"""Scheduler settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler's steps; see `EngineConfig`.

    Attributes:
        preemption: ``recompute`` frees the blocks of preempted sequences; ``swap`` copies them to swap memory
            first, if that has room.
        pipeline_stages: steps that are under way at the same time; each decodes a share of the sequences.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    max_step_time: float | None = None
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_model_len < 2:
            raise ValueError(
                f"max_num_seqs = {self.max_num_seqs} and max_model_len = {self.max_model_len} leave no room "
                "for a prompt and an output token: give at least 1 and 2"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = "
                f"{self.max_num_seqs}: every running sequence takes a token of each step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_model_len = "
                f"{self.max_model_len}: raise it, or set enable_chunked_prefill"
            )
        if self.max_step_time is not None and not self.max_step_time > 0:
            raise ValueError(
                f"max_step_time = {self.max_step_time}: give seconds above 0, or None for no limit"
            )
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f"preemption = {self.preemption!r}: it is 'recompute' or 'swap'")
