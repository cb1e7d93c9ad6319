"""Models of images or sound with random weights, and processors of theirs that need no files."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

WORDS = 32
"""Tokens of the text after an image or a sound."""
PLACEHOLDER = 7
"""Token id of an image or a sound."""
_TEXTS = {"256m": (576, 1536, 30, 9, 3), "500m": (960, 2560, 32, 15, 5)}
"""Width, inner width, layers, heads and key heads of the language models."""


def text_settings(shape: str) -> dict[str, Any]:
    """Returns the settings of a language model of SmolVLM's."""
    width, inner, layers, heads, key_heads = _TEXTS[shape]
    return {
        "vocab_size": 49280,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "pad_token_id": 2,
    }


class Images(ABC):
    """Images of one size, as `Processor` takes them.

    Args:
        height: of an image, in pixels.
        width: of an image, in pixels.
        tokens: of an image.
    """

    modality = "image"

    def __init__(self, height: int, width: int, tokens: int) -> None:
        self._height, self._width, self.tokens = height, width, tokens

    def item(self, number: int) -> Image.Image:
        """Returns an image of random pixels."""
        size = (self._height, self._width, 3)
        return Image.fromarray(np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8))

    def page(self, number: int) -> Image.Image:
        """Returns a page of text."""
        made = Image.new("RGB", (self._width, self._height), "white")
        lines = [f"{number}.{line} " + "text of a page " * 20 for line in range(math.ceil(made.height / 16))]
        ImageDraw.Draw(made).multiline_text((16, 16), "\n".join(lines), fill="black")
        return made

    def inputs(self, item: Image.Image) -> dict[str, Tensor]:
        """Returns the inputs of the tower, from an image that is made as large as the others."""
        pixels = torch.from_numpy(np.array(item.resize((self._width, self._height))))
        return self.patches((pixels.permute(2, 0, 1).float() / 127.5 - 1).to(torch.bfloat16))

    @abstractmethod
    def patches(self, pixels: Tensor) -> dict[str, Tensor]:
        """Returns the inputs of the tower from pixels ``(3, height, width)``."""

    @abstractmethod
    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""

    def features(self, model: Any) -> Callable[..., Any]:
        """Returns the method of a base model that runs the tower."""
        return model.get_image_features


class SmolVLM(Images):
    """Inputs of a SmolVLM from images of its tower's size, without a tokenizer's files."""

    def __init__(self) -> None:
        super().__init__(512, 512, 64)

    def patches(self, pixels: Tensor) -> dict[str, Tensor]:
        """Returns the inputs of the tower from pixels ``(3, height, width)``."""
        return {"pixel_values": pixels[None, None]}

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        config = SmolVLMConfig(
            vision_config={**tower, "num_attention_heads": 12, "image_size": 512, "patch_size": 16},
            text_config=LlamaConfig(**text_settings(shape)),
            image_token_id=PLACEHOLDER,
            scale_factor=4,
            pad_token_id=2,
        )
        return SmolVLMForConditionalGeneration(config)


class Patches(Images):
    """Inputs of a model that takes patches in the order in which its tower merges them, as `SmolVLM`.

    Args:
        patch: side of a patch in pixels.
        height: of an image, in patches.
        width: of an image, in patches.
    """

    _merged = 2

    def __init__(self, patch: int, height: int, width: int) -> None:
        super().__init__(height * patch, width * patch, height * width // self._merged**2)
        self._patch = patch
        self._grid = torch.tensor([[1, height, width]])

    def patches(self, pixels: Tensor) -> dict[str, Tensor]:
        """Returns the inputs of the tower from pixels: each patch twice in time."""
        down, across = (side // self._merged for side in self._grid[0, 1:].tolist())
        split = pixels.view(3, down, self._merged, self._patch, across, self._merged, self._patch)
        patches = split.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, self._patch**2)
        return {"pixel_values": patches.repeat(1, 1, 2, 1).flatten(1), "image_grid_thw": self._grid}


class Qwen25VL(Patches):
    """The tower of Qwen2.5-VL 3B, with windows, before the language model of 256m."""

    def __init__(self) -> None:
        super().__init__(14, 36, 36)

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        text = text_settings("256m")
        half = text["hidden_size"] // text["num_attention_heads"] // 2
        sections = [half // 4, *[half * 3 // 8] * 2]
        rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        config = Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rotary},
            vision_config={"hidden_size": 1280, "out_hidden_size": text["hidden_size"], "depth": 32},
            image_token_id=PLACEHOLDER,
            tie_word_embeddings=False,
        )
        return Qwen2_5_VLForConditionalGeneration(config)


class Qwen3VL(Patches):
    """Qwen3-VL 2B, whole."""

    def __init__(self) -> None:
        super().__init__(16, 32, 32)

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        sections = [24, 20, 20]
        rotary = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
        tower = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
        config = Qwen3VLConfig(
            text_config={
                **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
                **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "pad_token_id": 2},
                "rope_parameters": {**rotary, "mrope_interleaved": True},
            },
            vision_config={**tower, "deepstack_visual_indexes": [5, 11, 17]},
            image_token_id=PLACEHOLDER,
            tie_word_embeddings=True,
        )
        return Qwen3VLForConditionalGeneration(config)


class GlmOcr(Patches):
    """GLM-OCR, whole; an image is a page of 66 × 48 patches, 792 tokens."""

    def __init__(self) -> None:
        super().__init__(14, 66, 48)

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        return GlmOcrForConditionalGeneration(GlmOcrConfig(image_token_id=PLACEHOLDER))


class Gemma4Audio:
    """The tower for sound of Gemma 4 E2B before a language model of 256m's sizes; ten seconds of sound."""

    modality = "audio"
    tokens = 250
    _frames, _bins = 1000, 128

    def item(self, number: int) -> np.ndarray[Any, Any]:
        """Returns random samples."""
        return np.random.default_rng(number).normal(0, 0.1, 160_000).astype(np.float32)

    def inputs(self, item: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """Returns the inputs of the tower: samples in the place of a spectrum, repeated to ten seconds."""
        given = torch.from_numpy(np.resize(item, (1, self._frames, self._bins))).to(torch.bfloat16)
        return {
            "input_features": given,
            "input_features_mask": torch.ones(1, self._frames, dtype=torch.bool),
        }

    def model(self, shape: str) -> Any:
        """Returns a model with random weights."""
        text = text_settings("256m")
        layers = text["num_hidden_layers"]
        config = Gemma4Config(
            text_config={
                **{**text, "head_dim": 64, "global_head_dim": 64, "hidden_size_per_layer_input": 0},
                **{"num_kv_shared_layers": 0, "sliding_window": 512},
                "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
            },
            audio_config={},
            vision_config=None,
            audio_token_id=PLACEHOLDER,
            image_token_id=8,
            video_token_id=9,
        )
        model = Gemma4ForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if name.endswith(
                "k_norm.weight"
            ):  # its scores are not scaled: with ones they are those of a maximum
                torch.nn.init.constant_(parameter, 64**-0.5)
        return model

    def features(self, model: Any) -> Callable[..., Any]:
        """Returns the method of a base model that runs the tower."""
        return model.get_audio_features


PAGES: dict[str, type[Images]] = {
    "256m": SmolVLM,
    "500m": SmolVLM,
    "qwen": Qwen25VL,
    "qwen3": Qwen3VL,
    "glm_ocr": GlmOcr,
}
"""Shapes of models of images."""
SHAPES: dict[str, Any] = {**PAGES, "gemma4_audio": Gemma4Audio}
"""All shapes, by their names."""


class Processor:
    """A processor of one image or sound, and some words.

    Args:
        shape: one of `SHAPES`.
    """

    image_token = audio_token = "<item>"

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    def __call__(self, images: Any = None, audio: Any = None, **_: Any) -> dict[str, Tensor]:
        item = images if self._shape.modality == "image" else audio
        while isinstance(item, list):
            (item,) = item
        if item is None:
            raise ValueError(f"these inputs are of an {self._shape.modality}")
        marks = torch.full((self._shape.tokens,), PLACEHOLDER)
        ids = torch.cat([marks, torch.arange(100, 100 + WORDS)])[None]
        given = {"input_ids": ids, **self._shape.inputs(item)}
        if isinstance(self._shape, Patches):
            given["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        return given
