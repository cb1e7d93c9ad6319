"""Routes of models that transcribe."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.streaming import cancel_on_disconnect
from torch_armllm.server.model_leases import registry_of
from torch_armllm.server.protocol.transcriptions import TranscriptionRequest
from torch_armllm.speech.subtitles import srt, vtt
from torch_armllm.speech.transcription import Transcription

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths of the routes, whose bodies may be larger."""
_MOST_FIELDS = 16
router = APIRouter()


@router.post(PATHS[0], response_model=None)
async def transcriptions(request: Request) -> Response:
    """Writes down what is said in an audio file."""
    return await _respond(request, "transcribe")


@router.post(PATHS[1], response_model=None)
async def translations(request: Request) -> Response:
    """Writes down in English what is said in an audio file."""
    return await _respond(request, "translate")


async def _respond(request: Request, task: str) -> Response:
    if not registry_of(request).speech:
        raise ApiError(
            400, f"no served model transcribes, and {request.url.path} needs one: serve a Whisper", "model"
        )
    body, audio = await _read(request)
    served = registry_of(request).find_speech(body.model)
    work = served.transcribe(
        audio, language=body.language, task=task, prompt=body.prompt, temperature=body.temperature
    )
    found = await cancel_on_disconnect(request.receive, work)
    if body.response_format == "text":
        return PlainTextResponse(found.text + "\n")
    if body.response_format == "srt":
        return PlainTextResponse(srt(found))
    if body.response_format == "vtt":
        return PlainTextResponse(vtt(found), media_type="text/vtt")
    return JSONResponse(
        {"text": found.text} if body.response_format == "json" else _verbose(found, body, task)
    )


async def _read(request: Request) -> tuple[TranscriptionRequest, bytes]:
    """Returns the fields and the file of a form.

    Raises:
        ApiError: there is no file, or several.
        RequestValidationError: a field is not valid.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "send the audio as a form (multipart/form-data) with the field file", "file")
    async with request.form(max_files=1, max_fields=_MOST_FIELDS) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file: send the audio as the field file", "file")
        fields: dict[str, list[str]] = {}
        for name, value in form.multi_items():
            if isinstance(value, str):
                fields.setdefault(name, []).append(value)
        audio = await file.read()
    try:
        return TranscriptionRequest.of(fields), audio
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _verbose(found: Transcription, body: TranscriptionRequest, task: str) -> dict[str, Any]:
    segments = [
        {
            "id": number,
            "seek": 0,
            "start": round(each.start, 2),
            "end": round(each.end, 2),
            "text": each.text,
            "tokens": each.token_ids,
            "temperature": body.temperature,
        }
        for number, each in enumerate(found.segments)
    ]
    return {
        "task": task,
        "language": found.language,
        "duration": round(found.duration, 3),
        "text": found.text,
        "segments": segments,
    }
