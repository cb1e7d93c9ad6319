"""Sizes of attention by configurations, also of those whose layers differ."""

from __future__ import annotations

import pytest
import transformers

from torch_armllm.hf.sizes import AttentionSizes, attention_sizes
from torch_armllm.model_survey.tiny_models import families


def test_sizes_are_those_of_the_configuration() -> None:
    config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4)
    assert attention_sizes(config) == AttentionSizes(layers=2, kv_heads=4, head_size=16)


def test_a_model_without_attention_has_none() -> None:
    assert attention_sizes(transformers.MambaConfig(hidden_size=64, num_hidden_layers=2)) is None


@pytest.mark.skipif("gemma4_text" not in families(), reason="this release of transformers lacks Gemma 4")
def test_sizes_are_the_largest_of_any_layer() -> None:
    text = transformers.Gemma4TextConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        layer_types=["sliding_attention", "full_attention"],
    )
    expected = AttentionSizes(layers=2, kv_heads=2, head_size=32)
    for config in (text, transformers.Gemma4Config(text_config=text.to_dict())):
        sizes = attention_sizes(config)
        assert sizes is not None
        if hasattr(config.get_text_config(), "per_layer_config"):  # others state one size, of most layers
            assert sizes == expected
