"""Request schemas of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from torch_armllm.server.protocol.body import RequestBody, TokenId
from torch_armllm.server.protocol.chat import Message, Tool, check_generation_prompt


class TokenizeRequest(RequestBody):
    """A request to tokenize a text or a conversation.

    Attributes:
        return_token_strs: True to return each token's text, too.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        check_generation_prompt(self)
        return self

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the chat template that the request sets."""
        return self.chat_template_kwargs or {}


class DetokenizeRequest(RequestBody):
    """A request for the text of token ids."""

    tokens: list[TokenId]
