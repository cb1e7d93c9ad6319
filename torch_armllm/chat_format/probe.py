"""Renderings of a chat template with sentinels, from which its format is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

USER, CONTENT, REASONING = "Zuserz", "Zcontentz", "Zreasonz"
NAME, OTHER = "zname_one", "zname_two"
KEY, KEY2, VALUE = "zkey_one", "zkey_two", "zvalue_one"
NUMBER = 7351
CALL_IDS = ("zid000001", "zid000002")

Render = Callable[..., str]
"""Renders messages: ``render(messages, tools=…, add_generation_prompt=…, **variables)``; raises where the
template refuses them."""

_MOST_SECONDS = 4
"""Time of a refusal after which a template is tried no more: it loops; see `template_process.SECONDS`."""
_VARIABLES: Sequence[Mapping[str, Any]] = ({"enable_thinking": True, "thinking": True}, {})


def _tool(name: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": "A text."} for key in (KEY, KEY2)}
    parameters = {"type": "object", "properties": properties, "required": [KEY]}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_tool(NAME), _tool(OTHER)]


class Probe:
    """Renders turns of an assistant.

    Args:
        render: renders messages; its errors of any kind mean that the template refuses them.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._slow = False
        self._prompt: str | None = None

    def turn(self, **message: Any) -> str | None:
        """Returns what a template writes behind the user's message for a message of the assistant."""
        messages = [{"role": "user", "content": USER}, {"role": "assistant", "content": "", **message}]
        return self._behind_user(messages, False)

    def prompt(self) -> str:
        """Returns what a template writes behind the user's message to begin a message of the assistant."""
        if self._prompt is None:
            self._prompt = self._behind_user([{"role": "user", "content": USER}], True) or ""
        return self._prompt

    def user_end(self) -> str:
        """Returns what a template writes behind a user's message."""
        return self._behind_user([{"role": "user", "content": USER}], False) or ""

    def calls(self, *calls: tuple[str, Mapping[str, Any]], **message: Any) -> str | None:
        """Returns `turn` of a message with calls; their arguments are an object, or else its text."""
        for content in ({}, {"content": None}):  # some render calls only where there is no content
            for as_text in (False, True):
                turn = self._turn_of_calls(calls, as_text, {**content, **message})
                if turn is not None and _shows(turn, calls):
                    return turn
        return None

    def _turn_of_calls(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], as_text: bool, message: Mapping[str, Any]
    ) -> str | None:
        made = [
            {
                "id": CALL_IDS[number],
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(dict(values)) if as_text else dict(values),
                },
            }
            for number, (name, values) in enumerate(calls)
        ]
        return self.turn(tool_calls=made, **message)

    def _behind_user(self, messages: list[dict[str, Any]], prompt: bool) -> str | None:
        for tools in (TOOLS, None):
            for variables in _VARIABLES:
                if self._slow:
                    return None
                began = time.monotonic()
                try:
                    text = self._render(messages, tools=tools, add_generation_prompt=prompt, **variables)
                except Exception:  # a template's own errors are of any kind
                    self._slow = time.monotonic() - began > _MOST_SECONDS
                    continue
                _, found, rest = text.rpartition(USER)
                if found:
                    return rest
        return None


def _shows(text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """True if a rendering holds all of some calls, and no object as Python or a string would print it."""
    shown = [name for name, _ in calls]
    for _, values in calls:
        shown += [str(part) for pair in values.items() for part in pair]
    if any(part not in text for part in shown):
        return False
    return "{'" not in text and '\\"' not in text and '{"{' not in text and "{{" not in text
