"""Facts about an engine that do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.text.stopping import find_eos_token_ids
from torch_armllm.llm.loading.loader import default_sampling_params
from torch_armllm.patching.state import patch_state
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.pooling.pooling_engine import PoolingEngine


@dataclass(frozen=True)
class EngineFacts:
    """Sizes of an engine and its model.

    Attributes:
        vocab_size: number of tokens in the model's vocabulary.
        drawable: token ids from there on are never drawn.
        hidden_size: width of the hidden states; None if the model's configuration does not say.
        max_model_len: most tokens of a prompt and its output together.
        max_num_seqs: most sequences that run at once.
        kv_bytes: bytes of the KV cache and the drafter's; 0 for a model that runs module by module, or pools.
        kv_tokens: tokens that a KV cache holds.
        eos_token_ids: of the model.
        defaults: sampling parameters that the model recommends.
        keeps_budgets: True if it is known how the model marks its reasoning.
    """

    vocab_size: int
    drawable: int
    hidden_size: int | None
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    kv_tokens: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams
    keeps_budgets: bool

    @classmethod
    def of(cls, engine: LLMEngine, tokenizer: Any, model: Any) -> EngineFacts:
        """Returns the facts of an engine in this process."""
        generation = getattr(model, "generation_config", None)
        decoder, blocks = engine.speculative_decoder, engine.scheduler.blocks
        return cls(
            engine.runner.vocab_size,
            engine.sampler.vocab_size,
            _hidden_size_of(model),
            engine.preprocessor.max_model_len,
            engine.scheduler.config.max_num_seqs,
            engine.runner.kv_bytes + (0 if decoder is None else decoder.kv_bytes),
            blocks.num_blocks * blocks.block_size,
            find_eos_token_ids(tokenizer, generation),
            default_sampling_params(generation),
            engine.sampler.knows_reasoning,
        )

    @classmethod
    def of_pooling(cls, engine: PoolingEngine, tokenizer: Any, model: Any) -> EngineFacts:
        """Returns the facts of an engine that pools: it draws no tokens, and has no KV cache."""
        generation = getattr(model, "generation_config", None)
        return cls(
            vocab_size=engine.model.kind.vocab_size,
            drawable=0,
            hidden_size=engine.model.kind.hidden_size,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            kv_bytes=0,
            kv_tokens=0,
            eos_token_ids=find_eos_token_ids(tokenizer, generation),
            defaults=default_sampling_params(generation),
            keeps_budgets=False,
        )

    def of_replicas(self, count: int) -> EngineFacts:
        """Returns the facts of several such engines together."""
        return replace(self, max_num_seqs=count * self.max_num_seqs, kv_bytes=count * self.kv_bytes)


def _hidden_size_of(model: Any) -> int | None:
    """Returns the width of a model's hidden states; None if its configuration does not say."""
    if isinstance(model, PlanModel):
        return model.plan.program.columns
    return patch_state(model).kind.hidden_size
