"""The kind of a model: what its configuration and its modules say."""

from __future__ import annotations

from transformers import BartConfig

from tests.support.models import tiny
from torch_armllm.hf.model_kind import is_encoder_decoder, kind_of


def test_a_causal_language_model_is_described() -> None:
    model = tiny("llama")
    kind = kind_of(model)
    assert (kind.name, kind.family) == ("LlamaForCausalLM", "llama")
    assert kind.generates and kind.predicts_tokens and kind.takes_ids
    assert not kind.has_two_stacks and not kind.sees and not kind.is_bare
    config = model.config
    assert (kind.hidden_size, kind.pad_token) == (config.hidden_size, config.pad_token_id)
    assert kind.stated_positions == kind.position_limit == config.max_position_embeddings


def test_a_changed_configuration_counts() -> None:
    model = tiny("llama")
    kind = kind_of(model)
    model.config.max_position_embeddings = 16
    assert kind.stated_positions == kind.position_limit == 16


def test_two_stacks_are_known_by_the_configuration() -> None:
    assert is_encoder_decoder(BartConfig()) and not is_encoder_decoder(BartConfig(is_encoder_decoder=False))
    assert not is_encoder_decoder(None)
