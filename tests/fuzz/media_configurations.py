"""Random configurations of families that take images, video or sound, and prompts for them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.fuzz.configurations import ATTEMPTS, Case, drawn_text
from torch_armllm.engine.media.video import as_video
from torch_armllm.model_survey.tiny_models import tiny_config
from torch_armllm.model_survey.tiny_processors import inputs_of, modalities, placeholder, tiny_multimodal
from torch_armllm.model_survey.tiny_towers import is_tower

_TOWER_VALUES: Mapping[str, Sequence[Any]] = {
    "intermediate_size": (40, 48, 56),
    "mlp_dim": (40, 48, 56),
    "ffn_dim": (40, 48, 56),
    "encoder_ffn_dim": (40, 48, 56),
    "hidden_act": ("gelu", "silu", "gelu_pytorch_tanh"),
    "qkv_bias": (False, True),
    "attention_bias": (False, True),
    "layer_norm_eps": (1e-6, 1e-3),
    "rms_norm_eps": (1e-6, 1e-3),
}
"""Values of towers by the names of fields."""
_SHORTEST, _LONGEST = 20, 90
"""Sides of images."""

Prompt = dict[str, Any]


def draw_media(seed: int, family: str) -> Case:
    """Returns the case of a seed: the first of its configurations that transformers can run, or the last."""
    source = random.Random(seed)
    config = tiny_config(family)
    for attempt in range(ATTEMPTS):
        drawn = drawn_text(config, source, careful=attempt % 2 == 1) if attempt < ATTEMPTS - 1 else {}
        case = Case(seed, family, _merged(drawn, _drawn_towers(config, source)))
        if _runs(case):
            break
    return case


@torch.no_grad()
def _runs(case: Case) -> bool:
    """True if transformers makes a model of a configuration that runs on each modality."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, processor = tiny_multimodal(case.family, seed=case.seed, **case.overrides)
            for modality in modalities(processor):
                if not model(**inputs_of(processor, modality)).logits.isfinite().all():
                    return False
        except Exception:  # noqa: BLE001 - transformers refuses in many ways
            return False
    return True


def _drawn_towers(config: Any, source: random.Random) -> dict[str, Any]:
    """Returns drawn values of the parts of a configuration that are towers."""
    drawn: dict[str, Any] = {}
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is None:
            continue
        inner = _drawn_towers(part, source)
        for field, choices in _TOWER_VALUES.items() if is_tower(name) else ():
            given = vars(part).get(field)
            if isinstance(given, type(choices[0])) and source.random() < 0.4:
                inner[field] = source.choice(choices)
        if inner:
            drawn[name] = inner
    return drawn


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**one, **other}
    for name in set(one) & set(other):
        if isinstance(one[name], dict) and isinstance(other[name], dict):
            both[name] = _merged(one[name], other[name])
    return both


def media_prompts(processor: Any, seed: int) -> list[Prompt]:
    """Returns prompts with items of each modality and without: one and several, at different places.

    A text follows the last item: positions after one that ends a prompt are counted in another way by
    ``generate`` of transformers.

    Args:
        processor: of a tiny model.
        seed: of the sizes and values.
    """
    source = random.Random(seed)
    prompts: list[Prompt] = []
    taken = modalities(processor)
    for modality in taken:
        mark, make = f" {placeholder(processor, modality)} ", _MAKERS[modality]
        one, two, three = (make(source, processor) for _ in range(3))
        prompts += [
            _prompt(f"{_words(source)}{mark}{_words(source)}", {modality: [one]}),
            _prompt(f"{mark}{_words(source)}", {modality: [two]}),
            _prompt(f"{mark}{_words(source)}{mark} w1 {mark}{_words(source)}", {modality: [three, one, two]}),
        ]
    if len(taken) > 1:
        marks = " ".join(f" {placeholder(processor, modality)} {_words(source)}" for modality in taken)
        prompts.append(
            _prompt(marks, {modality: [_MAKERS[modality](source, processor)] for modality in taken})
        )
    prompts.append({"prompt": f"{_words(source)} w1 {_words(source)}"})
    return prompts


def _prompt(text: str, data: dict[str, list[Any]]) -> Prompt:
    return {"prompt": text, "multi_modal_data": data}


def _words(source: random.Random) -> str:
    return " ".join(f"w{source.randint(0, 40)}" for _ in range(source.randint(1, 9)))


def _pixels(source: random.Random, *before: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    sides = source.randint(_SHORTEST, _LONGEST), source.randint(_SHORTEST, _LONGEST)
    values = np.random.default_rng(source.randrange(1 << 30))
    return values.integers(0, 256, (*before, *sides, 3), dtype=np.uint8)


def _image(source: random.Random, processor: Any) -> Any:
    from PIL import Image

    return Image.fromarray(_pixels(source))


def _video(source: random.Random, processor: Any) -> Any:
    return as_video((_pixels(source, source.randint(2, 6)), {"fps": source.choice((1.0, 2.0, 24.0))}))


def _audio(source: random.Random, processor: Any) -> Any:
    extractor = getattr(processor, "audio_processor", getattr(processor, "feature_extractor", None))
    rate = getattr(extractor, "sampling_rate", 16000)
    values = np.random.default_rng(source.randrange(1 << 30))
    return values.normal(0.0, 0.3, source.randint(rate // 4, rate)).astype(np.float32)


_MAKERS: Mapping[str, Callable[[random.Random, Any], Any]] = {
    "image": _image,
    "video": _video,
    "audio": _audio,
}
