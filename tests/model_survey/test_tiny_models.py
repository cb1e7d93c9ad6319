"""Tiny models of families whose defaults cannot be shrunk name by name, and rows of refused ones."""

from __future__ import annotations

import pytest

from torch_armllm.model_survey.media import MEDIA
from torch_armllm.model_survey.page import summary
from torch_armllm.model_survey.stacks import tiny_stacks
from torch_armllm.model_survey.table import REFUSED, survey
from torch_armllm.model_survey.tiny_models import build_tiny, tiny_config, tiny_model
from torch_armllm.model_survey.tiny_processors import model_kind


def test_a_model_of_a_part_of_its_configuration_is_built_of_that_part() -> None:
    model = tiny_model("musicgen")
    assert model.config.model_type == "musicgen_decoder"
    assert model.get_input_embeddings()[0].embedding_dim == 64


def test_two_models_of_one_configuration_have_a_first() -> None:
    assert type(tiny_stacks("funnel")).__name__ == "FunnelModel"


def test_a_configuration_of_two_types_has_the_model_of_its_own() -> None:
    model = build_tiny(model_kind(), tiny_config("evolla"))
    assert type(model).__name__ == "EvollaForProteinText2Text"


@pytest.mark.parametrize("family", ["esm", "longformer", "luke", "moonshine_streaming", "perceiver"])
def test_stacks_are_small(family: str) -> None:
    assert sum(p.numel() for p in tiny_stacks(family).parameters()) < 10**6


@pytest.mark.parametrize("family", ["kyutai_speech_to_text", "qwen3_omni_moe", "vibevoice_asr"])
def test_codecs_and_talkers_are_small(family: str) -> None:
    model = build_tiny(model_kind(), tiny_config(family))
    assert sum(p.numel() for p in model.parameters()) < 3 * 10**7


@pytest.mark.parametrize(
    ("family", "kind", "why"),
    [
        ("gemma4_assistant", None, "drafts for another model"),
        ("diffusion_gemma", MEDIA, "does not generate token by token"),
    ],
)
def test_a_family_that_patch_refuses_is_a_row_with_its_reason(
    family: str, kind: str | None, why: str
) -> None:
    row = survey(family, kind)
    assert row.runs == REFUSED
    assert why in row.why
    assert "1 are refused by name, 0 were not tried" in summary([row])
