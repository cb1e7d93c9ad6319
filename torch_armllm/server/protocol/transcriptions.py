"""Form of a request to transcribe or translate audio."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class TranscriptionRequest(BaseModel):
    """Fields of ``POST /v1/audio/transcriptions`` and ``…/translations`` beside the file.

    Attributes:
        model: the model's name; absent: the first that transcribes.
        language: code of the spoken language, such as ``en``; absent: the model finds out.
        prompt: text before the audio, for names and their spelling.
        response_format: ``verbose_json``, ``srt`` and ``vtt`` have the segments with their times.
        temperature: 0 takes the most probable tokens; others draw.
        timestamp_granularities: ``segment`` is the only one.
        stream: must be false.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    language: str | None = Field(None, max_length=20)
    prompt: str | None = Field(None, max_length=10_000)
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: float = Field(0.0, ge=0.0, le=1.0)
    timestamp_granularities: list[Literal["segment"]] | None = None
    stream: Literal[False] | None = None

    @classmethod
    def of(cls, form: dict[str, list[str]]) -> TranscriptionRequest:
        """Reads the fields of a form; a name may end in ``[]``.

        Raises:
            ValidationError: a field is unknown, is given several times, or has a value that it cannot have.
        """
        values: dict[str, Any] = {}
        for name, given in form.items():
            key = name.removesuffix("[]")
            values[key] = given if key == "timestamp_granularities" or len(given) > 1 else given[0]
        if values.get("stream") == "false":
            values["stream"] = False
        return cls.model_validate(values)
