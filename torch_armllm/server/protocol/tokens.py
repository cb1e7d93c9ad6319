"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from torch_armllm.server.protocol.body import Body, TokenId
from torch_armllm.server.protocol.chat import Message, Tool


class TokenizeRequest(Body):
    """A text, or a conversation, whose tokens are wanted.

    Attributes:
        return_token_strs: whether each token's own text is told, too.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """Tokens whose text is wanted."""

    tokens: list[TokenId]
