"""The kind of a model: what its configuration and its modules say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BartConfig, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

from tests.support.models import tiny
from torch_armllm.hf.base_model import base_model_of
from torch_armllm.hf.model_kind import is_encoder_decoder, kind_of
from torch_armllm.hf.output_layer import output_layer_of


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


class _Wrapper(PreTrainedModel):  # type: ignore[misc]  # transformers has no types
    """A causal language model beside a tower, without a word about its base model and its head."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig, heads: int = 1) -> None:
        super().__init__(config)
        self.decoders = [LlamaForCausalLM(config) for _ in range(heads)]
        for number, decoder in enumerate(self.decoders):
            self.add_module(f"reader_{number}", decoder)
        self.tower = LlamaModel(config)

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        self.tower(inputs_embeds=torch.zeros(1, 2, self.config.hidden_size))
        return self.decoders[0](input_ids=input_ids, **options)


def test_a_wrapper_has_the_parts_of_the_model_that_it_hands_token_ids() -> None:
    wrapper = _Wrapper(tiny("llama").config).eval()
    assert base_model_of(wrapper) is wrapper.decoders[0].model
    assert output_layer_of(wrapper) is wrapper.decoders[0].lm_head
    assert output_layer_of(_Wrapper(wrapper.config, heads=2)) is None
    assert output_layer_of(wrapper.tower) is None and base_model_of(wrapper.tower) is wrapper.tower
