"""Tiny models of texts and pictures, saved with processors that are made here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    CLIPImageProcessor,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3nAudioFeatureExtractor,
    Gemma3nConfig,
    Gemma3nForConditionalGeneration,
    Gemma3nProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessorPil,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SiglipImageProcessorPil,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from tests.support.tokenizers import whole_words

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %} {{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %} assistant :"
)
_SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<fake_token_around_image>", "<end_of_utterance>"]
_SPECIAL += ["<global-img>", "<row_1_col_1>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_PADS = ["<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
_PADS += ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
_PADS += ["<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>"]
_PADS += ["<|tile_y_separator|>"]
_WORDS = ["what", "is", "this", "picture", "a", "cat", "dog", "red", "blue", ":", "user", "assistant"]
_VOCABULARY = [*_SPECIAL, *_WORDS, *(f"w{number}" for number in range(57)), *_PADS]
_IDS = {word: number for number, word in enumerate(_VOCABULARY)}
_TEXT: dict[str, Any] = {
    "vocab_size": len(_VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
WIDE = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 16, "num_key_value_heads": 4}
"""Sizes of layers that ranks share out."""
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

PLACEHOLDERS = {
    "llava": "<image>",
    "idefics3": "<image>",
    "mistral3": "[IMG]",
    "smolvlm": "<image>",
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
    "qwen3_5": "<|image_pad|>",
    "gemma3": "<start_of_image>",
    "gemma3n": "<|image_pad|>",
    "gemma4": "<image_soft_token>",
    "internvl": "<IMG_CONTEXT>",
    "llama4": "<|image|>",
    "paligemma": "<image>",
    "paligemma2": "<image>",
}
"""Stand for a picture in the texts of each kind of model."""
NEED_TORCHVISION = (
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "internvl",
    "gemma4",
    "llama4",
)
"""Kinds whose processors transformers makes with torchvision only."""
NEED_TIMM = ("gemma3n",)
"""Kinds whose vision towers are timm's, which needs torchvision too."""


def picture(number: int, width: int = 33, height: int = 40) -> Image.Image:
    """Returns a picture of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def picture_folder(folder: Path, kind: str, **text: int) -> Path:
    """Saves a tiny random model and its processor.

    Args:
        folder: to save to.
        kind: of model.
        text: settings of the language model in place of those of all.
    """
    torch.manual_seed(1)
    makers = {
        "llava": _llava,
        "tied": partial(_llava, tied=True),
        "idefics3": _idefics3,
        "smolvlm": _smolvlm,
        "mistral3": _mistral3,
        "qwen2_vl": _qwen2_vl,
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen3_vl": _qwen3_vl,
        "qwen3_5": _qwen3_5,
        "gemma3": _gemma3,
        "gemma3n": _gemma3n,
        "gemma4": _gemma4,
        "gemma4_ahead": partial(_gemma4, ahead=True),
        "internvl": _internvl,
        "llama4": _llama4,
        "llama4_moe": partial(_llama4, moe_layers=[0]),
        "paligemma": _paligemma,
        "paligemma2": partial(_paligemma, window=64),
    }
    with patch.dict(_TEXT, text):
        model, processor = makers[kind](_tokenizer())
    _randomized(model).save_pretrained(folder)
    (processor() if isinstance(processor, partial) else processor).save_pretrained(folder)
    return folder


def _randomized(model: Any) -> Any:
    """Returns the model with weights that hide nothing; its recurrent layers forget slowly."""
    for name, parameter in model.named_parameters():
        mean = -3.0 if name.endswith("A_log") else 1.0 if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, mean, 0.2)
    return model.float().eval()


def _tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    return whole_words(_IDS, [*_SPECIAL[4:], *_PADS], **options)


def _llava(tokenizer: PreTrainedTokenizerFast, tied: bool = False) -> tuple[Any, Any]:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_TOWER, image_size=28, patch_size=14),
        text_config=LlamaConfig(**{**_TEXT, "tie_word_embeddings": tied}),
        image_token_index=_IDS["<image>"],
        vision_feature_layer=-1,
        tie_word_embeddings=tied,
    )
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    config = Idefics3Config(
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        text_config=LlamaConfig(**_TEXT),
        image_token_id=_IDS["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=3,
    )
    images = Idefics3ImageProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    template = TEMPLATE.replace("IMAGE", "<image>")
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    return Idefics3ForConditionalGeneration(config), processor


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Returns a SmolVLM with the processor of Idefics3, which does the same with pictures."""
    config = SmolVLMConfig(
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        text_config=LlamaConfig(**_TEXT),
        image_token_id=_IDS["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=3,
    )
    _, processor = _idefics3(tokenizer)
    return SmolVLMForConditionalGeneration(config), processor


def unserved_model() -> Any:
    """Returns a tiny model of pictures that no folder holds, without a processor."""
    torch.manual_seed(1)
    config = AyaVisionConfig(
        text_config=LlamaConfig(**_TEXT),
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    )
    return AyaVisionForConditionalGeneration(config).eval()


def _paligemma(tokenizer: PreTrainedTokenizerFast, window: int = 0) -> tuple[Any, Any]:
    """Returns a PaliGemma, or a PaliGemma 2 with a window that holds a prompt."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    text = {**_TEXT, "model_type": "gemma2", **windows} if window else {**_TEXT, "model_type": "gemma"}
    config = PaliGemmaConfig(
        text_config={**text, "tie_word_embeddings": False},
        vision_config={**_TOWER, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        projection_dim=_TEXT["hidden_size"],
        image_token_index=_IDS["<image>"],
        tie_word_embeddings=False,
    )
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, tokenizer, TEMPLATE.replace("IMAGE", "<image>"))
    return PaliGemmaForConditionalGeneration(config), processor


_QWEN_SIZES: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 12}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}}


def _qwen2_vl(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    config = Qwen2VLConfig(
        text_config={**_TEXT, **_MROPE},
        vision_config={
            **{"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4},
            "hidden_size": _TEXT["hidden_size"],
        },
        **_qwen_tokens(),
    )
    return Qwen2VLForConditionalGeneration(config), partial(_qwen_processor, Qwen2VLProcessor, tokenizer)


def tower_model(kind: str) -> Any:
    """Returns a tiny random Gemma 4 or Llama 4, without its processor, which needs torchvision."""
    torch.manual_seed(1)
    makers = {"gemma4": _gemma4, "gemma4_clipped": partial(_gemma4, clipped=True), "llama4": _llama4}
    model, _ = makers[kind](_tokenizer())
    return _randomized(model)


def qwen_model(kind: str, **text: int) -> Any:
    """Returns a tiny random model of a kind of Qwen, without its processor, which may need torchvision.

    Args:
        kind: of model.
        text: see `picture_folder`.
    """
    torch.manual_seed(1)
    with patch.dict(_TEXT, text):
        model, _ = _QWENS[kind](_tokenizer())
    model = _randomized(model)
    model.lm_head.weight.data[[_IDS[word] for word in _PADS]] = 0.0  # no answer holds a placeholder
    return model


class Qwen2VLPictures:
    """A processor of Qwen's models for pictures only: that of transformers needs torchvision, for videos."""

    image_token = "<|image_pad|>"

    def __init__(self) -> None:
        self.tokenizer = _tokenizer()
        self._pictures = Qwen2VLImageProcessorPil(**_QWEN_SIZES)

    def __call__(
        self, text: list[str], images: list[list[Image.Image]], return_tensors: str
    ) -> dict[str, Any]:
        """Returns the inputs of the model for one text."""
        given = self._pictures(images[0], return_tensors=return_tensors)
        (words,) = text
        for grid in given["image_grid_thw"]:
            words = words.replace("<|image_pad|>", "<|video_pad|>" * (int(grid.prod()) // 4), 1)
        words = words.replace("<|video_pad|>", "<|image_pad|>")
        ids = self.tokenizer(words, return_tensors=return_tensors)["input_ids"]
        return {"input_ids": ids, **given, "mm_token_type_ids": (ids == _IDS["<|image_pad|>"]).int()}


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    tower = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    tower["out_hidden_size"] = _TEXT["hidden_size"]
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, **_MROPE},
        vision_config={**tower, "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        **_qwen_tokens(),
    )
    processor = partial(_qwen_processor, Qwen2_5_VLProcessor, tokenizer)
    return Qwen2_5_VLForConditionalGeneration(config), processor


def _qwen3_tower() -> dict[str, Any]:
    sizes = {"depth": 3, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48}
    return {**sizes, "num_position_embeddings": 16, "out_hidden_size": _TEXT["hidden_size"]}


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    config = Qwen3VLConfig(
        text_config={**_TEXT, **_MROPE, "num_hidden_layers": 3},
        vision_config={**_qwen3_tower(), "deepstack_visual_indexes": [1, 0]},
        **_qwen_tokens(),
    )
    return Qwen3VLForConditionalGeneration(config), partial(_qwen3_processor, tokenizer)


def _qwen3_5(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Returns a Qwen3.5 of a recurrent layer before each layer of attention."""
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    recurrent |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    rotary = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
    config = Qwen3_5Config(
        text_config={
            **{**_TEXT, **recurrent, "num_hidden_layers": 4},
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {**rotary, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
        },
        vision_config=_qwen3_tower(),
        **_qwen_tokens(),
    )
    tokenizer = Qwen3_5Tokenizer(vocab=_letters(), merges=[], **_QWEN3_5_TOKENS)
    return Qwen3_5ForConditionalGeneration(config), partial(_qwen3_processor, tokenizer)


_QWEN3_5_TOKENS: dict[str, Any] = {
    **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "additional_special_tokens": [*_SPECIAL[4:], *_PADS],
}


def _letters() -> dict[str, int]:
    """Returns the vocabulary with letters in the place of words, for tokenizers that split words."""
    letters = iter("Ġ:abcdefghijklmnopqrstuvwxyz")
    names = [next(letters, word) if word[0] == "w" and word[1:].isdigit() else word for word in _VOCABULARY]
    return {name: number for number, name in enumerate(names)}


_QWENS = {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_5}


def _qwen_tokens() -> dict[str, Any]:
    tokens = {"image_token_id": _IDS["<|image_pad|>"], "video_token_id": _IDS["<|video_pad|>"]}
    return {**tokens, "vision_start_token_id": _IDS["<global-img>"], "tie_word_embeddings": False}


def _qwen_processor(kind: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    images = Qwen2VLImageProcessorPil(**_QWEN_SIZES)
    template = TEMPLATE.replace("IMAGE", "<|image_pad|>")
    return kind(images, tokenizer, Qwen2VLVideoProcessor(**_QWEN_SIZES), chat_template=template)


def _qwen3_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = Qwen2VLImageProcessorPil(**_QWEN_SIZES)
    template = TEMPLATE.replace("IMAGE", "<|image_pad|>")
    sizes = {"shortest_edge": 64, "longest_edge": 6000}  # pixels of all frames
    videos = Qwen3VLVideoProcessor(patch_size=4, merge_size=2, temporal_patch_size=2, size=sizes)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=template)


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Returns a Gemma 3 whose window is shorter than two pictures, and cuts into one."""
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = _tokenizer(extra_special_tokens=names)
    config = Gemma3Config(
        text_config={
            **{name: value for name, value in _TEXT.items() if name != "tie_word_embeddings"},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 3,
            "query_pre_attn_scalar": 16,
        },
        vision_config={**_TOWER, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        boi_token_index=_IDS["<start_of_image>"],
        eoi_token_index=_IDS["<end_of_image>"],
        image_token_index=_IDS["<image_soft_token>"],
        tie_word_embeddings=False,
    )
    template = TEMPLATE.replace("IMAGE", "<start_of_image>")
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3ForConditionalGeneration(config), Gemma3Processor(images, tokenizer, template, 4)


def _gemma3n(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Returns a Gemma 3n, whose words from the end of a picture on are looked up in tables of their own."""
    first = _IDS["<|image_pad|>"]
    names = {"boi_token": "<start_of_image>", "eoi_token": "<|video_pad|>", "image_token": "<|image_pad|>"}
    names |= {"boa_token": "<img>", "eoa_token": "</img>", "audio_token": "<video>"}
    config = Gemma3nConfig(
        text_config={
            **{name: value for name, value in _TEXT.items() if name != "tie_word_embeddings"},
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"sliding_window": 32, "num_kv_shared_layers": 0, "laurel_rank": 8},
            **{"vocab_size_per_layer_input": first, "hidden_size_per_layer_input": 8, "pad_token_id": 0},
        },
        vision_config={
            **{"architecture": "test_efficientnet", "hidden_size": 256},
            **{"vocab_size": 2, "vocab_offset": first},
        },
        audio_config={
            **{"vocab_size": len(_VOCABULARY) - first - 2, "vocab_offset": first + 2, "hidden_size": 16},
            **{"conf_num_attention_heads": 2, "conf_num_hidden_layers": 1, "input_feat_size": 16},
            "sscp_conv_channel_size": [8, 8],
        },
        vision_soft_tokens_per_image=4,
        boi_token_id=_IDS["<start_of_image>"],
        eoi_token_id=_IDS["<|video_pad|>"],
        image_token_id=first,
        boa_token_id=_IDS["<img>"],
        eoa_token_id=_IDS["</img>"],
        audio_token_id=_IDS["<video>"],
        tie_word_embeddings=False,
    )
    images = SiglipImageProcessorPil(size={"height": 64, "width": 64})
    template = TEMPLATE.replace("IMAGE", "<|image_pad|>")
    parts = (Gemma3nAudioFeatureExtractor(feature_size=16), images, _tokenizer(extra_special_tokens=names))
    processor = Gemma3nProcessor(*parts, chat_template=template, image_seq_length=4)
    return Gemma3nForConditionalGeneration(config), processor


def _gemma4(
    tokenizer: PreTrainedTokenizerFast, ahead: bool = False, clipped: bool = False
) -> tuple[Any, Any]:
    """Returns a Gemma 4 whose layers embed tokens too, or whose pictures' tokens attend to each other.

    The linear layers of its tower may be clipped to ranges.
    """
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    names |= {"image_token": "<image_soft_token>", "audio_token": "<video>"}
    names |= {"boa_token": "<img>", "eoa_token": "</img>"}
    config = Gemma4Config(
        text_config={
            **{name: value for name, value in _TEXT.items() if name != "tie_word_embeddings"},
            **{"max_position_embeddings": 1024, "num_kv_shared_layers": 0, "global_head_dim": 16},
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "sliding_window": 32,
            "vocab_size_per_layer_input": len(_VOCABULARY),
            "hidden_size_per_layer_input": 0 if ahead else 8,
            "use_bidirectional_attention": "vision" if ahead else None,
        },
        vision_config={
            **{**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
            "use_clipped_linears": clipped,
        },
        boi_token_id=_IDS["<start_of_image>"],
        eoi_token_id=_IDS["<end_of_image>"],
        image_token_id=_IDS["<image_soft_token>"],
        audio_token_id=_IDS["<video>"],
        video_token_id=_IDS["<|video_pad|>"],
        audio_config=None,
        tie_word_embeddings=False,
    )
    model = Gemma4ForConditionalGeneration(config)
    bounds = {"input_min": -1.5, "input_max": 1.25, "output_min": -0.5, "output_max": 0.75}
    for name, buffer in model.named_buffers():
        if (bound := bounds.get(name.split(".")[-1])) is not None:
            buffer.fill_(bound)
    return model, partial(_gemma4_processor, _tokenizer(extra_special_tokens=names))


def _gemma4_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    parts = (Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4VideoProcessor())
    return Gemma4Processor(*parts, chat_template=TEMPLATE.replace("IMAGE", "<image_soft_token>"))


def _internvl(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    names |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**_TOWER, image_size=[32, 32], patch_size=[8, 8]),
        text_config=Qwen2Config(**_TEXT),
        image_token_id=_IDS["<IMG_CONTEXT>"],
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    sizes = {"size": {"height": 32, "width": 32}}
    images = GotOcr2ImageProcessorPil(**sizes, crop_to_patches=False)
    parts = (images, _tokenizer(extra_special_tokens=names), InternVLVideoProcessor(**sizes))
    template = TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>")
    processor = InternVLProcessor(*parts, image_seq_length=4, chat_template=template)
    return InternVLForConditionalGeneration(config), processor


def _llama4(tokenizer: PreTrainedTokenizerFast, moe_layers: Sequence[int] = ()) -> tuple[Any, Any]:
    """Returns a Llama 4 whose last layer does not rotate, with experts in some layers."""
    text = {name: value for name, value in _TEXT.items() if name != "tie_word_embeddings"}
    tower = {"image_size": 32, "patch_size": 8, "vision_output_dim": 48, "pixel_shuffle_ratio": 0.5}
    tower |= {"intermediate_size": 128, "projector_input_dim": 48, "projector_output_dim": 48}
    config = Llama4Config(
        text_config={
            **{**text, "intermediate_size_mlp": 96, "moe_layers": list(moe_layers), "num_local_experts": 4},
            **{"no_rope_layers": [1, 0], "attention_chunk_size": 512},
        },
        vision_config={**_TOWER, **tower},
        image_token_index=_IDS["<|patch|>"],
        tie_word_embeddings=False,
    )
    return Llama4ForConditionalGeneration(config), partial(_llama4_processor, tokenizer)


def _llama4_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    images = Llama4ImageProcessor(size={"height": 32, "width": 32}, max_patches=2)
    template = TEMPLATE.replace("IMAGE", "<|image|>")
    return Llama4Processor(images, tokenizer, patch_size=8, chat_template=template)


def _mistral3(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**_TOWER, image_size=56, patch_size=14),
        text_config=MistralConfig(**_TEXT),
        image_token_index=_IDS["[IMG]"],
        vision_feature_layer=-1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    processor = PixtralProcessor(
        PixtralImageProcessor(size={"longest_edge": 56}, patch_size=28),
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=TEMPLATE.replace("IMAGE", "[IMG]"),
    )
    return Mistral3ForConditionalGeneration(config), processor
