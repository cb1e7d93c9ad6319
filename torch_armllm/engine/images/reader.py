"""Prompts with images, videos or sounds as tokens and embeddings, by a model's own processor and towers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.images.decoder_call import ReadingModel
from torch_armllm.engine.images.heard_audio import HeardAudio
from torch_armllm.engine.images.image_rows import PictureRows
from torch_armllm.engine.images.image_steps import PictureSteps
from torch_armllm.engine.images.media_facts import MediaFacts
from torch_armllm.engine.images.modalities import MODALITIES, items_of, names_of, sampling_rate
from torch_armllm.engine.images.processor_inputs import inputs_of
from torch_armllm.engine.images.prompt_rows import PromptRows
from torch_armllm.engine.images.trial import in_dtype
from torch_armllm.engine.media.taken_media import TakenMedia
from torch_armllm.patching.forwards.forward import PatchedForward
from torch_armllm.patching.forwards.layer_calls import LayerCalls, is_close

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReaderLimits:
    """Limits of prompts.

    Attributes:
        items: most items of a prompt, by modality.
        tokens: most tokens of a step.
        audio_seconds: most of an audio clip.
    """

    items: Mapping[str, int]
    tokens: int
    audio_seconds: float

    @classmethod
    def of(cls, config: EngineConfig) -> ReaderLimits:
        """Returns those of the settings of an engine."""
        return cls(config.media_limits, config.max_num_batched_tokens, config.max_audio_seconds)


class PictureReader:
    """Turns texts with images, videos or sounds into token ids and embeddings.

    Args:
        reading: takes token ids and what the processor makes of items, and calls its decoder.
        processor: the model's own.
        facts: of its trial.
        steps: what items change in the steps of its plan.
        limits: of prompts; their modalities are those that it takes.
        towers: encoders whose layers plans compute.
    """

    def __init__(
        self,
        reading: ReadingModel,
        processor: Any,
        facts: MediaFacts,
        steps: PictureSteps,
        limits: ReaderLimits,
        towers: Sequence[PatchedForward[LayerCalls]] = (),
    ) -> None:
        self.name = type(reading.module).__name__
        self.steps = steps
        self.limits = dict(limits.items)
        self.processor = processor
        self._most_tokens = limits.tokens
        self._audio_seconds = limits.audio_seconds
        self._unchecked = list(towers)
        self._facts = facts
        self._reading = reading
        self._rows = PromptRows(reading, facts)
        self._heard = HeardAudio(self.name, sampling_rate(processor))

    @property
    def taken(self) -> TakenMedia:
        """Images, sound and videos that the model takes."""
        refusals = {
            name: f"{self.name} takes no {modality.noun}: "
            + self._facts.reasons.get(name, "limit_mm_per_prompt allows none")
            for name, modality in MODALITIES.items()
        }
        return TakenMedia(
            self.name,
            self.limits,
            refusals,
            sampling_rate(self.processor),
            self._audio_seconds,
            getattr(self.processor, "video_processor", None),
        )

    def remove_layers(self) -> None:
        """Removes the layers of the language model, which others compute: a prompt needs what is before."""
        if not self._reading.has_decoder:
            return  # it shows what the first one is given
        for module in list(self._reading.decoder.modules()):
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
        """Returns the tokens and the rows of a prompt.

        Args:
            prompt: ``{"prompt": text, "multi_modal_data": {"image": image or images, …}}``, with ``video``
                and ``audio`` likewise; its ``mm_processor_kwargs`` are arguments of the processor.
            check: raises ValueError for tokens that the engine cannot serve, before the tower runs.

        Raises:
            ValueError: the text and the items do not fit each other or the model.
        """
        text, items = self._checked(prompt)
        options = prompt.get("mm_processor_kwargs") or {}
        if not items:
            tokens = self.processor.tokenizer(text, **options)
            return list(tokens["input_ids"]), None
        nouns = names_of(list(items))

        def read(items: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
            return inputs_of(self.processor, text, items, self._reading.asks, options)

        try:
            inputs = read(items)
        except Exception as error:
            raise ValueError(f"the processor of {self.name} refuses the prompt: {error}") from error
        ids = inputs["input_ids"]
        check(ids[0].tolist())
        self._heard.check(items, inputs, read)
        inputs = in_dtype(inputs, self.steps.plan.program.dtype)
        try:
            with torch.no_grad():
                rows = self._read(inputs, nouns)
        except MemoryError:
            raise
        except Exception as error:  # items of odd shapes fail anywhere in the model
            raise ValueError(f"{self.name} refuses the {nouns}: {error}") from error
        if not rows.positions:
            raise ValueError(f"the prompt has {nouns} and no placeholder for them")
        return ids[0].tolist(), rows

    def _checked(self, prompt: Mapping[str, Any]) -> tuple[str, dict[str, list[Any]]]:
        data, text = prompt["multi_modal_data"], prompt.get("prompt")
        if not isinstance(data, Mapping) or (other := sorted(set(data) - set(MODALITIES))):
            given = ", ".join(map(repr, other)) if isinstance(data, Mapping) else type(data).__name__
            known = ", ".join(MODALITIES)
            raise ValueError(f'multi_modal_data holds {given}: give {{"image": image or images}}, of {known}')
        if not isinstance(text, str):
            nouns = names_of([name for name in MODALITIES if data.get(name) is not None]) or "media"
            raise ValueError(f"a prompt with {nouns} needs its text as 'prompt'; token ids do not do")
        return text, items_of(data, self.taken)

    def _read(self, inputs: dict[str, Any], nouns: str) -> PictureRows:
        """Returns the rows of a prompt; the first ones are compared with those by the towers' modules."""
        try:
            rows = self._rows_of(inputs)
        except Exception as error:
            rows = self._without_towers(inputs, error)
        self._check_spans(rows, inputs["input_ids"].shape[1], nouns)
        for tower in list(self._unchecked):
            self._check_tower(tower, inputs, rows.rows)
        return rows

    def _without_towers(self, inputs: dict[str, Any], error: Exception) -> PictureRows:
        """Returns the rows of a prompt by modules alone, after plans that nothing has checked yet failed.

        Raises:
            Exception: the modules fail too, so that it is no fault of the plans.
        """
        if not self._unchecked:
            raise error
        with ExitStack() as stack:
            for tower in self._unchecked:
                stack.enter_context(tower.by_modules("the plan of a tower has failed"))
            rows = self._rows_of(inputs)
        for tower in self._unchecked:
            self._drop(tower, str(error))
        self._unchecked.clear()
        return rows

    def _rows_of(self, inputs: dict[str, Any]) -> PictureRows:
        call = self._reading.decoder_call(inputs)
        return self._rows.of(inputs["input_ids"][0], call, self.steps.plan.program.dtype)

    def _check_spans(self, rows: PictureRows, tokens: int, nouns: str) -> None:
        """Raises ValueError if a step has no room for tokens that attend to each other."""
        longest = max((last - first for first, last in rows.spans), default=0)
        if longest > self._most_tokens:
            kind = f"a prompt with {nouns}" if longest == tokens else f"one of the {nouns}"
            raise ValueError(
                f"{kind} of {self.name} is {longest} tokens, which one step computes, and "
                f"max_num_batched_tokens is {self._most_tokens}: raise it"
            )

    def _check_tower(
        self, tower: PatchedForward[LayerCalls], inputs: dict[str, Any], by_plan: Tensor
    ) -> None:
        """Compares what the plan of a tower computes for the first items with its modules.

        Some models read results of a layer within the tower, which a plan of all layers does not keep.
        """
        if not tower.calls.count:
            return
        with tower.by_modules("the plan of a tower is checked"):
            by_modules = self._rows_of(inputs).rows
        self._unchecked.remove(tower)
        if not is_close(by_plan, by_modules):
            self._drop(tower, "its plan computes others")

    def _drop(self, tower: PatchedForward[LayerCalls], reason: str) -> None:
        base: Any = tower.base
        logger.info("%s: %s runs by its modules: %s", self.name, type(base).__name__, reason)
        del base.forward
