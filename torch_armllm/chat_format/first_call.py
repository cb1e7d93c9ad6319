"""The end of an output behind its first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_armllm.chat_format.format import ChatFormat
from torch_armllm.chat_format.parser import Tools
from torch_armllm.chat_format.rendering import make_parser


@dataclass(frozen=True)
class FirstCall:
    """A `TextEnd`: an output ends behind its first call.

    Attributes:
        format: the model's format.
        tools: name and JSON schema of the arguments of each tool.
        begins_in: part that the output begins within.
    """

    format: ChatFormat
    tools: Tools
    begins_in: str = ""

    def begin(self) -> Callable[[str], int | None]:
        """See `TextEnd`."""
        parser = make_parser(self.format, self.tools, begins_in=self.begins_in)

        def end(text: str) -> int | None:
            parser.feed(text)
            return parser.first_call_end

        return end
