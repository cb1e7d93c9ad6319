"""Tests of outputs that have the class of a family's own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling
from transformers.models.auto import modeling_auto
from transformers.utils import ModelOutput

from torch_armllm.hf.cache_names import cache_of
from torch_armllm.hf.outputs import OutputForm

_FEW = ("llava", "qwen2_vl", "qwen3_5", "video_llama_3", "minimax_m3_vl", "gemma3n", "granite_speech")


class Base(nn.Module):
    """A base model that declares one class of outputs, and returns another."""

    def __init__(self, kind: type[Any], refused: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.kind, self.refused = kind, refused

    def forward(
        self, input_ids: Tensor, use_cache: bool = True
    ) -> tuple[Any, ...] | BaseModelOutputWithPooling:
        if int(input_ids[0, 0]) in self.refused:
            raise ValueError("a placeholder without its image")
        made: BaseModelOutputWithPooling = self.kind(last_hidden_state=torch.zeros(1, 1, 4))
        return made


def _families(all_of_them: bool) -> list[str]:
    names = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return [name for family, name in names.items() if all_of_them or family in _FEW]


def _output_classes(family: str) -> Iterator[type[Any]]:
    """Yields the classes of outputs with hidden states in the file of a family's model."""
    module = importlib.import_module(getattr(transformers, family).__module__)
    for kind in vars(module).values():
        if not (inspect.isclass(kind) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind)):
            continue
        names = [field.name for field in dataclasses.fields(kind)]
        required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
        if "last_hidden_state" in names and not set(required) - {"last_hidden_state"}:
            yield kind


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_outputs_have_all_fields_of_any_familys_class(all_of_them: bool) -> None:
    kinds = {kind for family in _families(all_of_them) for kind in _output_classes(family)}
    assert any("image_outputs" in {f.name for f in dataclasses.fields(kind)} for kind in kinds)
    hidden = torch.randn(1, 3, 4)
    for kind in kinds:
        output = OutputForm(Base(kind)).make(hidden, "a cache", rope_deltas=None, surely_no_field=1)
        assert type(output) is kind and output.last_hidden_state is hidden
        assert all(hasattr(output, field.name) for field in dataclasses.fields(kind)), kind
        assert cache_of(output) == (None if cache_of(output) is None else "a cache")
        assert output.to_tuple()[0] is hidden
        assert type(kind(**output)) is kind  # heads and wrappers hand them on so


def test_the_class_is_that_of_a_token_which_is_no_placeholder() -> None:
    class Own(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
        """A class that no annotation names."""

    assert OutputForm(Base(Own, refused=(0, 1))).kind is Own
    assert OutputForm(Base(Own, refused=(0, 1, 2))).kind is BaseModelOutputWithPooling
