"""Prompts with pictures as tokens and embeddings, by a model's own processor and vision tower."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.engine.images.attention_masks import is_mask_of
from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.media import check_count, check_size
from torch_armllm.engine.images.token_numbers import LaterTokens, RotaryPositions
from torch_armllm.patching.forwards.forward import PatchedForward
from torch_armllm.patching.forwards.layer_calls import LayerCalls, is_close

logger = logging.getLogger(__name__)
_KNOWN = ("attention_mask", "inputs_embeds", "position_ids", "cache_position")

_FEATURES = ("visual_pos_masks", "deepstack_visual_embeds")


class _ReachedDecoderError(Exception):
    """Carries the arguments of the language model's call out of the model's own forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class PictureReader:
    """Turns texts with pictures into token ids and embeddings.

    Args:
        model: takes token ids and pixels, and calls its language model.
        module_forward: its own ``forward``, not that of a plan.
        processor: the model's own.
        steps: what pictures change in the steps of its plan.
        limit: most pictures of a prompt.
        tokens: most tokens of a step.
        tower: computes the layers of the vision tower by a plan; None: its modules do.
    """

    def __init__(
        self,
        model: Any,
        module_forward: Callable[..., Any],
        processor: Any,
        steps: PictureSteps,
        limit: int,
        tokens: int,
        tower: PatchedForward[LayerCalls] | None = None,
    ) -> None:
        self.name = type(model).__name__
        self.steps = steps
        self.limit = limit
        self._most_tokens = tokens
        self._unchecked = tower
        self.processor = processor
        self._base = model
        self._module_forward = module_forward
        config = model.config
        token = getattr(config, "image_token_id", None)
        self._token = int(config.image_token_index if token is None else token)

    def remove_layers(self) -> None:
        """Removes the layers of the language model, which others compute: a prompt needs what is before."""
        for module in list(_decoder_of(self._base).modules()):
            if isinstance(getattr(module, "layers", None), nn.ModuleList):
                module.layers = nn.ModuleList()

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
        inputs = {name: value for name, value in inputs.items() if name != "labels"}  # those are for training
        ids = inputs["input_ids"]
        check(ids[0].tolist())
        spans = self._spans(ids[0])
        try:
            with torch.no_grad():
                if self._unchecked is not None:
                    self._check_tower(self._unchecked, inputs, spans)
                embeddings, rotary, features = self._embeddings(inputs, spans)
                self._check_texts(ids[0], embeddings)
        except MemoryError:
            raise
        except Exception as error:  # pictures of odd shapes fail anywhere in the model
            raise ValueError(f"{self.name} refuses the pictures: {error}") from error
        positions = (ids[0] == self._token).nonzero()[:, 0].tolist()
        if not positions:
            raise ValueError("the prompt has pictures and no placeholder for them")
        rows = torch.cat([embeddings[positions], *features], 1)
        whole = ids.numpy().tobytes() if self._prompts_are_spans else b""
        return ids[0].tolist(), PictureRows(positions, rows, rotary, spans, whole)

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
            check_size(picture)
        return text, [picture.convert("RGB") for picture in pictures]

    @property
    def _prompts_are_spans(self) -> bool:
        """True if all tokens of a prompt with pictures attend to each other."""
        return isinstance(self.steps.token_numbers, LaterTokens) and self.steps.token_numbers.prompts

    def _places(self, tokens: int) -> Tensor:
        """Returns the positions ``(1, T)`` by which a model rotates tokens of texts.

        PaliGemma's begin at 1, and its plan's at 0: rotation tells distances alone.
        """
        return torch.arange(tokens)[None] + int(self._prompts_are_spans)

    def _spans(self, ids: Tensor) -> list[tuple[int, int]]:
        """Returns first and last position, exclusive, of tokens that attend to each other.

        Raises:
            ValueError: a step has no room for one of them.
        """
        if not isinstance(self.steps.token_numbers, LaterTokens):
            return []
        if self._prompts_are_spans:
            self._check_span("prompt with pictures", len(ids))
            return [(0, len(ids))]
        shown = torch.nn.functional.pad((ids == self._token).int(), (1, 1)).diff()
        spans = list(
            zip((shown == 1).nonzero()[:, 0].tolist(), (shown == -1).nonzero()[:, 0].tolist(), strict=True)
        )
        self._check_span("picture", max((last - first for first, last in spans), default=0))
        return spans

    def _check_span(self, kind: str, tokens: int) -> None:
        if tokens > self._most_tokens:
            raise ValueError(
                f"a {kind} of {self.name} is {tokens} tokens, which one step computes, and "
                f"max_num_batched_tokens is {self._most_tokens}: raise it"
            )

    def _embeddings(
        self, inputs: dict[str, Any], spans: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Returns what the model gives to its decoder.

        That are embeddings ``(T, hidden)``, positions of M-RoPE ``(T, 3)``, and what each of the first layers
        adds to the n tokens of pictures, ``(n, hidden)``.

        The model's own forward runs up to that call, so its embeddings are those of transformers.

        Raises:
            ValueError: the decoder is given something that a plan does not know.
        """
        dtype, numbers = self.steps.plan.program.dtype, self.steps.token_numbers
        inputs = {
            n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in inputs.items()
        }
        base = self._base
        with _stopping(_decoder_of(base)):
            try:
                self._module_forward(**inputs, use_cache=False)
            except _ReachedDecoderError as reached:
                given = reached.arguments
            else:
                raise ValueError("the model does not call its language model")
            finally:
                if hasattr(base, "rope_deltas"):
                    base.rope_deltas = None  # that of this prompt is no other's
        found: Tensor = given["inputs_embeds"][0]
        positions = given.get("position_ids")
        rotary = None
        if isinstance(numbers, RotaryPositions):
            if positions is None or positions.shape != (3, 1, len(found)):
                raise ValueError("its tokens do not have three positions each")
            rotary = positions[:, 0].T.contiguous()
        elif positions is not None and not torch.equal(positions, self._places(len(found))):
            raise ValueError("its tokens have other positions than their places")
        window = getattr(base.config.get_text_config(), "sliding_window", None)
        only_windows = isinstance(numbers, LaterTokens) and numbers.only_windows
        if not is_mask_of(given.get("attention_mask"), len(found), spans, window, only_windows):
            raise ValueError("its tokens attend to others than the earlier ones and those of their picture")
        known: tuple[str, ...] = _KNOWN
        features = []
        if self.steps.layers:
            known = (*_KNOWN, *_FEATURES)
            if not torch.equal(given[_FEATURES[0]], inputs["input_ids"] == self._token):
                raise ValueError("it adds features to other tokens than those of pictures")
            features = [feature.to(dtype) for feature in given[_FEATURES[1]]]
            if len(features) != self.steps.layers:
                raise ValueError(f"it adds features after {len(features)} layers, not {self.steps.layers}")
        if given.get("per_layer_inputs") is not None:
            ids = inputs["input_ids"].masked_fill(inputs["input_ids"] == self._token, self.steps.token)
            if not torch.equal(given["per_layer_inputs"], base.language_model.get_per_layer_inputs(ids)):
                raise ValueError("its layers embed tokens of pictures as others than that of padding")
            known = (*known, "per_layer_inputs")
        further = sorted(
            n for n, v in given.items() if n not in known and isinstance(v, (Tensor, list, dict))
        )
        if further:
            raise ValueError(f"its language model is given {', '.join(further)}, which plans do not know")
        return found.to(dtype), rotary, features

    def _check_tower(
        self, tower: PatchedForward[LayerCalls], inputs: dict[str, Any], spans: list[tuple[int, int]]
    ) -> None:
        """Compares what the plan of the tower computes for the first pictures with its modules.

        Some models read results of a layer within the tower, which a plan of all layers does not keep.
        """
        calls = tower.calls.count
        by_plan = self._embeddings(inputs, spans)[0]
        if tower.calls.count == calls:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this call without a plan is no fault of the user's
            with tower.by_modules("the plan of a vision tower is checked"):
                by_modules = self._embeddings(inputs, spans)[0]
        shown = inputs["input_ids"][0] == self._token
        self._unchecked = None
        if not is_close(by_plan[shown], by_modules[shown]):
            logger.info("%s: the vision tower runs by its modules, as its plan computes others", self.name)
            base: Any = tower.base
            del base.forward

    def _check_texts(self, ids: Tensor, embeddings: Tensor) -> None:
        """Checks that the other tokens are looked up as the plan does.

        Gemma 3n looks up the last ones of its vocabulary in tables of their own, and so does its plan.
        """
        first = getattr(getattr(self._base, "embed_vision", None), "vocab_offset", None)
        is_text = ids != self._token
        if first is not None:
            is_text &= ids < first
        table = self._base.get_input_embeddings()
        if not torch.equal(table(ids[is_text]).to(embeddings.dtype), embeddings[is_text]):
            raise ValueError("it changes the embeddings of text, which plans do at another place")


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
