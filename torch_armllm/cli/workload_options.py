"""Options of the requests that benchmarks send: prompts, their lengths, and how they are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch_armllm.cli.setting_options import TEMPERATURE
from torch_armllm.system.settings import COUNT, INPUT_FILE, SWITCH, setting

PROMPTS = '.jsonl with "prompt" or "turns", or text with a prompt per line'


@dataclass(frozen=True)
class Workload:
    """Requests of a benchmark."""

    prompts: Path | None = setting(None, INPUT_FILE, PROMPTS, none="random tokens")
    num_prompts: int | None = setting(None, COUNT, "number of prompts", none="64; with --prompts: all")
    input_len: int = setting(128, COUNT, "tokens per random prompt")
    output_len: int = setting(128, COUNT, "maximum number of tokens to generate per completion")
    ignore_eos: bool | None = setting(
        None, SWITCH, "generate up to --output-len whatever the model says", none="for random prompts only"
    )
    temperature: float = setting(1.0, TEMPERATURE, "sampling temperature; 0: greedy")

    @property
    def ignores_eos(self) -> bool:
        """True if completions go on after the model's end."""
        return self.prompts is None if self.ignore_eos is None else self.ignore_eos
