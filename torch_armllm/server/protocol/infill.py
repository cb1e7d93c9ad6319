"""Request schema of `/infill`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from torch_armllm.server.protocol.body import MAX_PROMPTS, RequestBody, RequestPart

_Text = Annotated[str, Field(min_length=1)]


class InfillFile(RequestPart):
    """A file, or a part of one, that helps to write the middle."""

    filename: str | None = None
    text: str


class InfillRequest(RequestBody):
    """A request for the text between two others, in llama.cpp's format.

    Attributes:
        input_prefix: text before the middle.
        input_suffix: text after the middle.
        input_extra: other files; the first are left out if not all fit.
        prompt: beginning of the middle, which the output does not repeat.
        n_predict: most output tokens; -1: as many as the model allows; 0: only runs the prefill.
        repeat_penalty: `repetition_penalty` of the other routes.
        seed: -1: a random one.
        t_max_predict_ms: time after which the output ends, once it has a line break; 0: none.
    """

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_PROMPTS)] | None = None
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    stop: Annotated[list[_Text], Field(max_length=64)] | None = None
    t_max_predict_ms: Annotated[float, Field(ge=0)] = 0
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool | None = None
