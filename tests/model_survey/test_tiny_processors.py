"""Tiny models and processors that are made for each other read images, videos and sound."""

from __future__ import annotations

import pytest
import torch

from torch_armllm.model_survey.tiny_processors import inputs_of, modalities, tiny_multimodal

SOUND = ("qwen2_audio",)
IMAGES = ("llava", "idefics3")
NEED_TORCHVISION = ("qwen2_vl", "gemma4", "internvl", "video_llava", "kimi_k25", "cohere2_vision")


@torch.no_grad()
def last_logits(model: torch.nn.Module, processor: object, modality: str, seed: int) -> torch.Tensor:
    found: torch.Tensor = model(**inputs_of(processor, modality, seed)).logits[0, -1]
    return found


@pytest.mark.parametrize("family", [*IMAGES, *SOUND, *NEED_TORCHVISION])
def test_a_tiny_model_reads_what_its_processor_makes(family: str) -> None:
    if family in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    model, processor = tiny_multimodal(family)
    found = modalities(processor)
    assert found
    for modality in found:
        one, other = (last_logits(model, processor, modality, seed) for seed in (0, 1))
        assert one.isfinite().all()
        assert not torch.equal(one, other), f"{modality} has no influence"


def test_a_family_and_a_seed_give_the_same_model_each_time() -> None:
    one, other, third = (tiny_multimodal("llava", seed=seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], third[name]) for name in one)


def test_a_family_without_a_processor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no processor to vision-encoder-decoder"):
        tiny_multimodal("vision-encoder-decoder")
