"""One request to a server, timed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import httpx

from torch_armllm.benchmark.serving.events import EventReader
from torch_armllm.benchmark.serving.records import Question, Record

Endpoint = Literal["chat", "completions"]

_PATHS = {"chat": "chat/completions", "completions": "completions"}
_SHOWN = 300  # characters of an error body that messages show


@dataclass(frozen=True)
class Target:
    """The measured server, model and endpoint.

    Attributes:
        base_url: URL of the server, with or without ``/v1``.
        endpoint: chat or completions.
        model: name of a model of the server; None: its first model.
        api_key: API key; None: none is sent.
        ignore_eos: True if outputs go on to their length limit.
        temperature: sampling temperature; 0: greedy.
        timeout: limit in seconds without any data from the server.
    """

    base_url: str
    endpoint: Endpoint = "chat"
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    timeout: float = 600.0


class BadAnswerError(Exception):
    """The server's response is not of the expected form."""


class Client:
    """Sends requests and times their responses.

    Args:
        target: server, model and endpoint of the requests.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        root = target.base_url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=f"{root}/v1/",
            headers={b"Authorization": f"Bearer {target.api_key}".encode()} if target.api_key else {},
            timeout=httpx.Timeout(target.timeout, connect=30),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self.model = target.model or ""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def find_model(self) -> None:
        """Sets the model to the server's first model, unless the target names a model.

        Raises:
            ValueError: the server lists no model.
        """
        if self.model:
            return
        try:
            answer = await self._client.get("models")
            answer.raise_for_status()
            self.model = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"{self._target.base_url} does not list its models: {_error_text(error)}"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self._target.base_url} does not list its models; give --model") from error

    async def ask(self, question: Question) -> Record:
        """Send a request and wait for the last chunk of its output; errors go into the record."""
        record = Record(time.perf_counter())
        try:
            path = _PATHS[self._target.endpoint]
            async with self._client.stream("POST", path, json=self._body(question)) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise BadAnswerError(f"status {response.status_code}: {text[:_SHOWN]}")
                await _listen(response, record)
        except (LookupError, TypeError, AttributeError) as error:
            record.error = f"an event of the stream is of another shape: {error!r}"
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, BadAnswerError) as error:
            record.error = _error_text(error)
        return record

    def _body(self, question: Question) -> dict[str, Any]:
        target, prompt = self._target, question.prompt
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": question.output_len,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignore_eos:
            body["ignore_eos"] = True
        if target.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt
        return body


async def _listen(response: httpx.Response, record: Record) -> None:
    reader = EventReader()
    complete = False
    usage: dict[str, Any] | None = None
    async for piece in response.aiter_bytes():
        now = time.perf_counter()
        for event in _parsed(reader, piece):
            if event is None:
                complete = True
                continue
            if event.get("error"):
                raise BadAnswerError(f"in the stream: {json.dumps(event['error'])[:_SHOWN]}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                record.ended = now
                complete = complete or bool(choice.get("finish_reason"))
                if _has_text(choice):
                    record.arrivals.append(now)
    if not complete or not record.ended:
        raise BadAnswerError("the stream ended before the answer did")
    record.output_tokens = usage["completion_tokens"] if usage else len(record.arrivals)
    record.prompt_tokens = usage["prompt_tokens"] if usage else None


def _parsed(reader: EventReader, piece: bytes) -> list[dict[str, Any] | None]:
    """Parses the events of a chunk; None marks the end of the stream."""
    try:
        events = [None if data == "[DONE]" else json.loads(data) for data in reader.feed(piece)]
    except ValueError as error:
        raise BadAnswerError(f"an event of the stream is not JSON: {error}") from error
    if not all(event is None or isinstance(event, dict) for event in events):
        raise BadAnswerError("an event of the stream is not an object")
    return events


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text") or any(delta.get(name) for name in names))


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
