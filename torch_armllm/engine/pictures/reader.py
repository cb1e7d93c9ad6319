"""Prompts with pictures as tokens and embeddings, by a model's own processor and vision tower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_armllm.engine.pictures.media import check_count, check_pixels
from torch_armllm.engine.pictures.picture_rows import PictureRows
from torch_armllm.patching.state import is_patched, patched_forward
from torch_armllm.plan.native import NativePlan
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.plan.spare_rows import SpareRows, with_spare_rows

if TYPE_CHECKING:
    from torch_armllm.patching.forward import PatchedForward

logger = logging.getLogger(__name__)

FAMILIES = ("llava", "idefics3", "smolvlm", "mistral3")
"""Model types whose picture tokens are rows like any others: causal, at one position each."""
_REASONS = {
    "gemma3": "picture tokens attend to later ones of their picture, which plans do not compute",
    "gemma3n": "picture tokens attend to later ones of their picture, which plans do not compute",
    "gemma4": "picture tokens attend to later ones of their picture, which plans do not compute",
    "paligemma": "prompts attend to later tokens, which plans do not compute",
    "qwen2_vl": "tokens have three positions each (M-RoPE), and plans know one",
    "qwen2_5_vl": "tokens have three positions each (M-RoPE), and plans know one",
    "qwen3_vl": "tokens have three positions each (M-RoPE), and layers add further features of pictures",
    "qwen3_5": "tokens have three positions each (M-RoPE), and plans know one",
}
_KNOWN = ("attention_mask", "inputs_embeds", "position_ids", "cache_position")


class _ReachedDecoderError(Exception):
    """Carries the arguments of the language model's call out of the model's own forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class PictureReader:
    """Turns texts with pictures into token ids and embeddings.

    Args:
        name: class name of the model.
        forward: of the model's base model.
        processor: the model's own.
        spare: rows of the plan's embedding table that steps write the embeddings to.
        limit: most pictures of a prompt.
    """

    def __init__(
        self, name: str, forward: PatchedForward, processor: Any, spare: SpareRows, limit: int
    ) -> None:
        self.name = name
        self.spare = spare
        self.limit = limit
        self.processor = processor
        self._forward = forward
        config: Any = forward.base.config
        token = getattr(config, "image_token_id", None)
        self._token = int(config.image_token_index if token is None else token)

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template; None: the tokenizer's."""
        template = getattr(self.processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def read(
        self, prompt: Mapping[str, Any], check: Callable[[list[int]], None]
    ) -> tuple[list[int], PictureRows | None]:
        """Returns the tokens and the picture rows of a prompt.

        Args:
            prompt: ``{"prompt": text, "multi_modal_data": {"image": picture or pictures}}``; its
                ``mm_processor_kwargs`` are arguments of the processor.
            check: raises ValueError for tokens that the engine cannot serve, before the tower runs.

        Raises:
            ValueError: the text and the pictures do not fit each other or the model.
        """
        text, pictures = self._checked(prompt)
        if not pictures:
            tokens = self.processor.tokenizer(text, **prompt.get("mm_processor_kwargs") or {})
            return list(tokens["input_ids"]), None
        options = prompt.get("mm_processor_kwargs") or {}
        try:
            inputs = self.processor(text=[text], images=[pictures], return_tensors="pt", **options)
        except Exception as error:
            raise ValueError(f"the processor of {self.name} refuses the prompt: {error}") from error
        ids = inputs["input_ids"]
        check(ids[0].tolist())
        try:
            with torch.no_grad():
                embeddings = self._embeddings(dict(inputs))
        except MemoryError:
            raise
        except Exception as error:  # pictures of odd shapes fail anywhere in the model
            raise ValueError(f"{self.name} refuses the pictures: {error}") from error
        positions = (ids[0] == self._token).nonzero()[:, 0].tolist()
        if not positions:
            raise ValueError("the prompt has pictures and no placeholder for them")
        self._check_rows(ids[0], embeddings)
        return ids[0].tolist(), PictureRows(positions, embeddings[positions].clone())

    def _checked(self, prompt: Mapping[str, Any]) -> tuple[str, list[Any]]:
        data, text = prompt["multi_modal_data"], prompt.get("prompt")
        if not isinstance(data, Mapping) or (other := sorted(set(data) - {"image"})):
            given = ", ".join(map(repr, other)) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f'multi_modal_data holds {given}: give {{"image": picture or pictures}}')
        if not isinstance(text, str):
            raise ValueError("a prompt with pictures needs its text as 'prompt'; token ids do not do")
        value = data.get("image")
        pictures = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        check_count(len(pictures), self.limit)
        for picture in pictures:
            if not hasattr(picture, "convert") or not hasattr(picture, "size"):
                raise ValueError(f"a picture is a {type(picture).__name__}: give a PIL.Image.Image")
            check_pixels(picture)
        return text, [picture.convert("RGB") for picture in pictures]

    def _embeddings(self, inputs: dict[str, Any]) -> Tensor:
        """Returns what the model gives to its decoder, ``(T, hidden)``.

        The model's own forward runs up to that call, so its embeddings are those of transformers.

        Raises:
            ValueError: the decoder is given something that a plan does not know.
        """
        dtype = self.spare.table.dtype
        inputs = {
            n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in inputs.items()
        }
        with _stopping(_decoder_of(self._forward.base)):
            try:
                self._forward.module_forward(**inputs, use_cache=False)
            except _ReachedDecoderError as reached:
                given = reached.arguments
            else:
                raise ValueError("the model does not call its language model")
        found: Tensor = given["inputs_embeds"][0]
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if positions is not None and not torch.equal(positions, torch.arange(len(found))[None]):
            raise ValueError("its tokens have other positions than their places")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            raise ValueError("its tokens attend to others than the earlier ones")
        further = sorted(
            n for n, v in given.items() if n not in _KNOWN and isinstance(v, (Tensor, list, dict))
        )
        if further:
            raise ValueError(f"its language model is given {', '.join(further)}, which plans do not know")
        return found.to(dtype)

    def _check_rows(self, ids: Tensor, embeddings: Tensor) -> None:
        """Checks that a plan looks the other tokens up as the model did."""
        is_text = ids != self._token
        if not torch.equal(self.spare.table[ids[is_text]], embeddings[is_text]):
            raise ValueError(f"{self.name} changes the embeddings of text, which plans do at another place")


@contextmanager
def _stopping(decoder: Any) -> Iterator[None]:
    """Makes calls of a module raise `_ReachedDecoderError` while the context lasts."""

    def forward(**arguments: Any) -> None:
        raise _ReachedDecoderError(arguments)

    own = decoder.__dict__.get("forward")
    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def _decoder_of(base: Any) -> Any:
    return base.language_model if hasattr(base, "language_model") else base.text_model


def picture_reader(model: Any, processor: Any, limit: int, tokens: int) -> PictureReader | str:
    """Returns the reader of a model's pictures, or the reason why it takes none.

    The plan of the model gets an embedding table with further rows, which replaces the old one.

    Args:
        model: a patched model, or one from the plan cache.
        processor: the model's own; None: there is none.
        limit: most pictures of a prompt.
        tokens: most tokens of a step.
    """
    name = type(model).__name__
    if isinstance(model, PlanModel):
        return f"{model.name} came from the plan cache, which keeps no vision towers: set ARMLLM_PLAN_CACHE=0"
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    if getattr(config, "vision_config", None) is None:
        return f"{name} takes no pictures: it is a model of text"
    if kind not in FAMILIES:
        known = _REASONS.get(kind, f"only pictures of {', '.join(FAMILIES)} are known")
        return f"{name} is served for text only: {known}"
    if limit == 0:
        return "limit_mm_per_prompt allows no pictures"
    if processor is None:
        return f"{name} is served for text only: its files have no processor, or Pillow is missing ([vision])"
    forward = patched_forward(model) if is_patched(model) else None
    if forward is None or not isinstance(forward.plan, NativePlan):
        return f"{name} is served for text only: it has no native plan"
    if forward.shape.states:
        return f"{name} is served for text only: its language model has recurrent layers"
    try:
        program, spare = with_spare_rows(forward.plan.program, forward.vocab_size, tokens)
    except ValueError as reason:
        return f"{name} is served for text only: {reason}"
    forward.plan = NativePlan(program, forward.plan.experts)
    table = model.get_input_embeddings().weight
    if table.shape == (forward.vocab_size, spare.table.shape[1]) and table.dtype == spare.table.dtype:
        tied = model.get_output_embeddings()
        if tied is None or getattr(tied, "weight", None) is not table:
            table.data = spare.table[: forward.vocab_size]  # the weights are stored once
    return PictureReader(name, forward, processor, spare, limit)
