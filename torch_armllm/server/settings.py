"""What whoever runs the server decides."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        name: of the model, as clients ask for it.
        api_keys: any of these opens all routes; none: nothing is asked for.
        max_request_bytes: of a request's body.
        max_queue: answers that may wait for their turn, beside those that run.
        max_tokens: most tokens of an answer, whatever a client asks for; None: what the model allows.
        request_timeout: seconds that an answer may take.
        read_timeout: seconds within which a request must have arrived, and that a silent connection lasts.
        write_timeout: seconds for which a client may leave unread what was sent.
        drain_timeout: seconds that running requests have when the server is asked to end.
        allowed_origins: of pages in browsers (CORS); none: of no others.
        chat_template: instead of the tokenizer's own.
        tool_parser: ``hermes``, ``llama``, ``mistral``, or None: told by the chat template.
    """

    name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_request_bytes: int = 8 << 20
    max_queue: int = 256
    max_tokens: int | None = None
    request_timeout: float = 600.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_parser: str | None = None
