"""Options of llguidance: those of all grammars that users write, and those that a schema may set."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""After a user's rules.  Otherwise llguidance looks for the bytes that have to follow, without an end where
they repeat and the rules never let them end, as in ``start: A A`` with ``A: "b"+``."""
_OPTIONS = "x-guidance"
"""llguidance's options, at the top of a schema."""


def check_options(schema: Any) -> None:
    """Raises ValueError for options of llguidance in a schema with which its JSON would be none."""
    options = schema.get(_OPTIONS, {}) if isinstance(schema, dict) else {}
    for name, value in options.items() if isinstance(options, dict) else ():
        if name == "whitespace_pattern" and isinstance(value, str):
            check_space(value)
        elif not isinstance(value, bool):
            raise ValueError(
                f"structured outputs: {_OPTIONS} of the schema sets {name} to {str(value)[:100]!r}; only "
                "whitespace_pattern and options that are true or false can be set"
            )


def check_space(pattern: str) -> None:
    """Raises ValueError if white space between JSON's parts may be other text, which may repeat for ever."""
    if _holds_text(pattern):
        raise ValueError(
            f"structured outputs: whitespace_pattern {pattern[:100]!r} matches text that is no white "
            "space, as [ \\t\\n\\r]* does not"
        )


@lru_cache(maxsize=64)  # a structural tag may have a schema for each argument
def _holds_text(pattern: str) -> bool:
    """True if a pattern matches other text than white space."""
    from llguidance import LLMatcher, LLTokenizer, regex_to_lark

    other = f"start: OTHER\nOTHER: /(?:{regex_to_lark(pattern, '')})/ & ~/\\s*/"
    matcher = LLMatcher(LLTokenizer("byte"), other + UNFORCED, log_level=0)
    if matcher.is_error():
        return False
    matcher.compute_bitmask()  # an error if there is no other text
    return not matcher.is_error()
