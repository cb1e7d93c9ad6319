"""Tiny models of texts and images, videos or sound, each with its processor."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from math import isqrt
from typing import Any

import numpy as np
import torch
from transformers.processing_utils import TextKwargs

from torch_armllm.model_survey.processor_parts import configs_of, tiny_processor
from torch_armllm.model_survey.tiny_models import VOCABULARY, build_tiny, tiny_config
from torch_armllm.model_survey.tiny_tokenizers import SPARE
from torch_armllm.model_survey.tiny_towers import IMAGE_SIZE, PATCH_SIZE

MODALITIES = {"image": "images", "video": "videos", "audio": "audio"}
"""The argument of a processor by modality."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %} IMAGE {% elif part.type == 'video' %} VIDEO "
    "{% elif part.type == 'audio' %} AUDIO {% else %} {{ part.text }} {% endif %}"
    "{% endfor %}{% endif %} {% endfor %} assistant :"
)
FRAMES = 4
_METADATA = {"fps": 2.0, "total_num_frames": FRAMES, "frames_indices": [*range(FRAMES)]}
_COUNTS = ("image_seq_length", "image_seq_len", "num_image_tokens")
"""Arguments of processors with the number of an image's tokens."""


def multimodal_families() -> list[str]:
    """Returns the model types of transformers' models that take images, videos or sound beside texts."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as names

    return list(names)


def model_kind() -> Any:
    """Returns the class that makes such models."""
    import transformers

    return getattr(transformers, "AutoModelForMultimodalLM", transformers.AutoModelForImageTextToText)


def sample(modality: str, seed: int = 0, processor: Any = None) -> Any:
    """Returns a random image, video or sound, in the form that processors take.

    Args:
        modality: a key of `MODALITIES`.
        seed: of the values.
        processor: gives the rate of the sound.
    """
    source = np.random.default_rng(seed)
    if modality == "audio":
        extractor = getattr(processor, "audio_processor", getattr(processor, "feature_extractor", None))
        return source.normal(0.0, 0.3, getattr(extractor, "sampling_rate", 16000)).astype(np.float32)
    frames = source.integers(0, 256, (FRAMES, 40, 33, 3), dtype=np.uint8)
    if modality == "video":
        return frames
    from PIL import Image

    return Image.fromarray(frames[0])


def modalities(processor: Any) -> list[str]:
    """Returns what a processor takes beside texts, by its parts and the arguments of its call."""
    attributes = processor.get_attributes()
    parts = {"image": ("image",), "video": ("video",), "audio": ("audio", "feature_extractor")}
    names = inspect.signature(processor.__call__).parameters
    found = []
    for modality, argument in MODALITIES.items():
        has_part = any(part in attribute for part in parts[modality] for attribute in attributes)
        token = getattr(processor, f"{modality}_token", None)
        if has_part and argument in names and (token is not None or modality == "image"):
            found.append(modality)
    return found


def placeholder(processor: Any, modality: str) -> str:
    """Returns what stands for an image, a video or a sound in a text, by trying.

    Args:
        processor: a processor.
        modality: a key of `MODALITIES`.
    """
    token, fake, given = (
        getattr(processor, name, None)
        for name in (f"{modality}_token", f"fake_{modality}_token", f"{modality}_placeholder_token")
    )
    around = [getattr(processor, f"{modality}_{end}_token", None) for end in ("start", "end")]
    begin, end = (
        getattr(processor, f"{'audio' if modality == 'audio' else 'vision'}_{side}_token", None)
        for side in ("bos", "eos")
    )
    whole = f"{begin}{token}{end}" if None not in (begin, token, end) else None
    texts = (whole, given, fake if fake == token else None, token)
    candidates = [str(text) for text in texts if text is not None]
    if None not in around:
        candidates.append("".join(map(str, (around[0], token, around[1]))))
    with contextlib.suppress(Exception):  # most want a placeholder
        ids = inputs_of(processor, modality, stands="")["input_ids"]
        if token is not None and bool((ids == processor.tokenizer.convert_tokens_to_ids(str(token))).any()):
            return ""
    for candidate in [*candidates, ""]:
        with contextlib.suppress(Exception):  # the next may be what it wants
            inputs_of(processor, modality, stands=candidate)
            return candidate
    return candidates[0] if candidates else ""


def inputs_of(processor: Any, modality: str | None, seed: int = 0, stands: str | None = None) -> Any:
    """Returns the inputs of a model for a text with an image, a video or a sound.

    Args:
        processor: a processor.
        modality: a key of `MODALITIES`; None: a text alone.
        seed: see `sample`.
        stands: for it in the text; None: `placeholder`.
    """
    given: dict[str, Any] = {"return_tensors": "pt"}
    if "return_mm_token_type_ids" in TextKwargs.__annotations__:
        given["return_mm_token_type_ids"] = True
    if modality is None:
        return processor(text=["w1 w2 w3"], **given)
    given[MODALITIES[modality]] = [sample(modality, seed, processor)]
    if modality == "video":
        given["video_metadata"] = [_METADATA]
        given["do_sample_frames"] = False
    stands = placeholder(processor, modality) if stands is None else stands
    found = processor(text=[f"w1 {stands} w2 w3"], **given)
    floats = {name: value.float() for name, value in found.items() if _is_half(value)}
    return {**found, **floats}


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def tiny_multimodal(family: str, seed: int = 0, **overrides: Any) -> tuple[Any, Any]:
    """Returns a tiny random model of a family and its processor.

    Args:
        family: a ``model_type`` of `multimodal_families`.
        seed: of the weights.
        overrides: configuration values.

    Raises:
        ValueError: transformers has no processor for it, or the model would be large.
    """
    config = tiny_config(family, **overrides)
    draft = tiny_processor(config)
    _fit_vocabulary(config, draft)
    model = build_tiny(model_kind(), config, seed=seed)
    processor = _fitting(model, draft)
    processor.chat_template = _template(processor)
    return model, processor


def _fitting(model: Any, draft: Any) -> Any:
    """Returns the first processor whose image the model takes, by the arguments that count its tokens."""
    accepted = inspect.signature(type(draft).__init__).parameters
    counts = [name for name in _COUNTS if name in accepted]
    by_patches = not counts and "patch_size" in accepted
    rows = _rows_of_image(model, draft) if counts or by_patches else []
    grid = (IMAGE_SIZE // PATCH_SIZE) ** 2
    tried: list[dict[str, int]] = (
        [dict.fromkeys(counts, count) for count in [*rows, grid]] if counts else [{}]
    )
    if by_patches:  # of a tower that does not tell its stride
        tried += [{"patch_size": IMAGE_SIZE // isqrt(count)} for count in rows if 0 < count <= grid]
    if "num_additional_image_tokens" in accepted:
        tried += [{**each, "num_additional_image_tokens": 1} for each in tried]
    for arguments in tried:
        processor = tiny_processor(model.config, **arguments)
        with contextlib.suppress(Exception), torch.no_grad():  # the next may fit
            model(**inputs_of(processor, "image"))
            return processor
    return processor


def _template(processor: Any) -> str:
    template = TEMPLATE
    for modality in MODALITIES:
        template = template.replace(modality.upper(), placeholder(processor, modality))
    return template


def _fit_vocabulary(config: Any, processor: Any) -> None:
    """Gives a configuration the vocabulary of a processor's tokenizer, and the ids of its tokens."""
    tokenizer = processor.tokenizer
    tokens = {modality: _repeated(processor, modality) for modality in modalities(processor)}
    spare = iter(tokenizer.convert_tokens_to_ids([f"<spare_{n}>" for n in range(SPARE)]))
    for part in configs_of(config):
        if "<image>" in (getattr(part, "vocabulary_map", None) or {}):
            part.vocabulary_map["<image>"] = tokens["image"]
        if not hasattr(part, "vocab_offset"):
            for name in ("vocab_size", "vocab_size_per_layer_input"):
                if getattr(part, name, None) == VOCABULARY:
                    setattr(part, name, len(tokenizer))
        for name, value in list(vars(part).items()):
            if not name.endswith(("_token_id", "_token_index", "_patch_id")) or isinstance(value, list):
                continue
            stem = name.rpartition("_")[0]
            if (modality := stem.partition("_")[0]) in tokens and stem in (
                f"{modality}_token",
                "image_patch",
            ):
                setattr(part, name, tokens[modality])
            elif value is not None:
                alias = stem.replace("_start_", "_bos_").replace("_end_", "_eos_")
                found = getattr(tokenizer, f"{stem}_id", getattr(tokenizer, f"{alias}_id", None))
                setattr(part, name, next(spare) if found is None else found)


def _repeated(processor: Any, modality: str) -> int:
    """Returns the id that a processor writes for each row of an image, a video or a sound."""
    own = getattr(processor, f"{modality}_token_id", None)
    with contextlib.suppress(Exception):  # its numbers do not fit yet
        ids = inputs_of(processor, modality)["input_ids"].flatten().tolist()
        unknown = processor.tokenizer.unk_token_id  # times of frames, for one
        (token, times), *_ = Counter(token for token in ids if token != unknown).most_common(1)
        if times > 1:
            return int(token)
    return int(own if own is not None else processor.tokenizer.unk_token_id)


@torch.no_grad()
def _rows_of_image(model: Any, processor: Any) -> list[int]:
    """Returns the number of rows that a model computes of an image, and of a tile of it."""
    reader = next((each for each in (model, model.base_model) if hasattr(each, "get_image_features")), None)
    with contextlib.suppress(Exception):  # a model that reads images otherwise
        given = processor.image_processor(sample("image"), return_tensors="pt")
        accepted = inspect.signature(reader.get_image_features).parameters  # type: ignore[union-attr]
        found = reader.get_image_features(**{k: v for k, v in given.items() if k in accepted})  # type: ignore[union-attr]
        rows = getattr(found, "pooler_output", found)
        parts = rows if isinstance(rows, (list, tuple)) else [rows]
        count = int(sum(each.numel() for each in parts) // model.config.get_text_config().hidden_size)
        pixels = given["pixel_values"]
        tiles = max(1, pixels.shape[0] * (pixels.shape[1] if pixels.dim() == 5 else 1))
        return [count, count // tiles]
    return []
