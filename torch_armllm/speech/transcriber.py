"""`Transcriber`: audio to text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from torch_armllm.checkpoint.load import load_processor, resolve
from torch_armllm.checkpoint.model_config import read_config
from torch_armllm.checkpoint.pretrained import load_pretrained
from torch_armllm.engine.media.audio_files import read_audio
from torch_armllm.patching.patch import patch
from torch_armllm.patching.state import is_patched
from torch_armllm.speech.kind import FAMILIES
from torch_armllm.speech.transcription import Segment, Transcription
from torch_armllm.system.dtypes import float_dtype

if TYPE_CHECKING:
    from torch_armllm.quant.recipe import Recipe

_LEAST_TEMPERATURE = 1e-5
"""Lower ones take the most probable token, as in the engine: logits divided by them would not be finite."""
_MOST_TEMPERATURE = 3e38
"""The limit of float32, in which logits are divided."""

Task = Literal["transcribe", "translate"]


class Stopped(RuntimeError):
    """A transcription was stopped before its end."""


class Transcriber:
    """A Whisper model that writes down what is said in audio of any length.

    transformers' own ``generate`` cuts the audio into windows of 30 seconds.  One call runs at a time.

    Args:
        model: a folder, a name on the model hub, or a model, patched or not.
        processor: feature extractor and tokenizer; None: the model's own.
        dtype: of the loaded weights; ``auto``: the checkpoint's own.
        quantization: see `torch_armllm.patch`; ``auto`` is INT8.
        progress: shows a progress bar.

    Raises:
        ValueError: the model is not a Whisper.
        OSError: the checkpoint is not found.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        processor: Any = None,
        *,
        dtype: str | torch.dtype = "auto",
        quantization: str | Recipe | None = "auto",
        progress: bool = True,
    ) -> None:
        dtype = float_dtype(dtype)
        source = resolve(model) if isinstance(model, str) else model.name_or_path
        loaded: Any = model
        if isinstance(model, str):
            config = read_config(source)
            check_family(config, source)
            loaded = load_pretrained(AutoModelForSpeechSeq2Seq, source, config, dtype=dtype).eval()
        else:
            check_family(model.config, type(model).__name__)
        if not is_patched(loaded):
            patch(loaded, quantization, progress=progress)
        self.model = loaded
        self.processor = processor or load_processor(source)
        self._lock = threading.Lock()

    @property
    def rate(self) -> int:
        """Samples a second of the audio that the model takes."""
        return int(self.processor.feature_extractor.sampling_rate)

    @property
    def languages(self) -> list[str]:
        """Codes of the languages that the model knows; empty for models of one language."""
        ids = getattr(self.model.generation_config, "lang_to_id", None) or {}
        many = getattr(self.model.generation_config, "is_multilingual", False)
        return sorted(name.strip("<|>") for name in ids) if many else []

    def __call__(
        self,
        audio: bytes | NDArray[np.float32],
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str | None = None,
        temperature: float = 0.0,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Transcription:
        """Writes down what is said.

        Args:
            audio: a file (see `read_audio`), or float32 ``(samples,)`` at `rate`.
            language: a code of `languages`; None: the model finds out.
            task: ``translate`` into English.
            prompt: text before the audio, for names and spelling.
            temperature: 0 takes the most probable tokens; others draw.
            is_stopped: asked at every token; True ends the call.

        Raises:
            ValueError: the audio cannot be read or has no samples, or a parameter does not fit the model.
            Stopped: ``is_stopped`` said so.
        """
        if isinstance(audio, bytes):
            audio = read_audio(audio, self.rate)
        if audio.ndim != 1 or not len(audio):
            raise ValueError(f"audio must be samples of one channel, not of shape {audio.shape}")
        settings = self._settings(language, task, prompt, temperature)
        stop = _Stop(is_stopped)
        with self._lock, torch.no_grad():
            if is_stopped():
                raise Stopped("the call was stopped before it began")
            inputs = self._inputs(audio)
            if self.languages and language is None:
                settings["language"] = language = self._spoken(inputs["input_features"])
            out = self.model.generate(
                **inputs, **settings, return_segments=True, stopping_criteria=StoppingCriteriaList([stop])
            )
        if stop.happened:
            raise Stopped("the call was stopped")
        duration = len(audio) / self.rate
        segments = [self._segment(each, duration) for each in out["segments"][0]]
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(text, language if self.languages else None, duration, segments)

    def _settings(
        self, language: str | None, task: Task, prompt: str | None, temperature: float
    ) -> dict[str, Any]:
        config = self.model.generation_config
        if not 0 <= temperature <= _MOST_TEMPERATURE:
            raise ValueError(f"temperature is {temperature}; give 0 (the most probable token) or more")
        settings: dict[str, Any] = {"do_sample": temperature >= _LEAST_TEMPERATURE}
        if settings["do_sample"]:
            settings["temperature"] = temperature
        if getattr(config, "no_timestamps_token_id", None) is not None:
            settings["return_timestamps"] = True
        if self.languages:
            if language is not None and language not in self.languages:
                raise ValueError(
                    f"language {language!r} is not one of the model's: {', '.join(self.languages)}"
                )
            settings |= {"task": task, "language": language}
        elif task == "translate" or language not in (None, "en"):
            raise ValueError("this model knows one language: leave out language and translation")
        if prompt:
            settings["prompt_ids"] = self._prompt_ids(prompt)
        return settings

    def _prompt_ids(self, prompt: str) -> Tensor:
        ids: Tensor = self.processor.get_prompt_ids(prompt, return_tensors="pt")
        most = self.model.config.max_target_positions // 2 - 1
        if len(ids) > most:
            raise ValueError(f"the prompt has {len(ids)} tokens, and the model takes at most {most}: cut it")
        return ids

    def _inputs(self, audio: NDArray[np.float32]) -> dict[str, Tensor]:
        """Returns features: of 30 seconds, padded, or of longer audio as it is."""
        is_long = len(audio) > self.processor.feature_extractor.n_samples
        features = self.processor(
            audio,
            sampling_rate=self.rate,
            return_tensors="pt",
            truncation=False,
            padding="longest" if is_long else "max_length",
            return_attention_mask=True,
        )
        return {
            "input_features": features.input_features.to(self.model.dtype),
            "attention_mask": features.attention_mask,
        }

    def _segment(self, found: dict[str, Any], duration: float) -> Segment:
        start, end = (min(float(found[name]), duration) for name in ("start", "end"))
        first_time = (getattr(self.model.generation_config, "no_timestamps_token_id", None) or 0) + 1
        text_ids = [t for t in found["tokens"].tolist() if first_time == 1 or t < first_time]
        text = self.processor.tokenizer.decode(text_ids, skip_special_tokens=True)
        return Segment(start, end, text, text_ids)

    def _spoken(self, features: Tensor) -> str:
        """Returns the code of the language of the first 30 seconds."""
        frames = 2 * self.model.config.max_source_positions
        number = int(self.model.detect_language(features[:, :, :frames])[0])
        names: dict[str, int] = self.model.generation_config.lang_to_id
        return next(name.strip("<|>") for name, token in names.items() if token == number)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a call's sequences once it is stopped."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped
        self.happened = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.happened = self.happened or self._is_stopped()
        return torch.full((len(input_ids),), self.happened)


def check_family(config: Any, name: str) -> None:
    """Raises ValueError unless a configuration is one of a model that transcribes."""
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(f"{name} is a {kind}; models that transcribe are {', '.join(FAMILIES)}")
