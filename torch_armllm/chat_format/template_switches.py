"""Variables that a chat template reads, beside the conversation: switches such as `enable_thinking`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_GIVEN = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *(
            "raise_exception",
            "strftime_now",
            "tojson",
            "range",
            "namespace",
            "dict",
            "lipsum",
            "cycler",
            "joiner",
        ),
        *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    }
)
"""Names that every template gets, by transformers or by Jinja."""

_ASKS = ("defined", "undefined", "default", "d")
"""Tests and filters for a variable that may be missing."""

_SHOWS = ("think", "thought", "reason")
_HIDES = ("clear", "drop", "truncate", "skip", "disable")

_SAME = (("enable_thinking", "thinking"),)
"""Names of one switch in different templates."""


@lru_cache(maxsize=64)
def template_switches(template: str) -> tuple[str, ...]:
    """Returns the names of the variables that a template reads and a request may set, sorted.

    Empty for a template that cannot be parsed.
    """
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        # only parsed: compiling computes constants, which a template may make as large as it likes
        parsed = _compile_jinja_template("").environment.parse(template)
        found = meta.find_undeclared_variables(parsed)
    except Exception:  # no Jinja, or tags that only a newer transformers knows: rendering says so
        return ()
    # a name that the template sets is its own, unless it first asks whether it was given
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
    asked = {
        test.node.name
        for test in parsed.find_all((nodes.Test, nodes.Filter))
        if test.name in _ASKS and isinstance(test.node, nodes.Name)
    }
    names = found - (own - asked) - _GIVEN
    return tuple(sorted(name for name in names if not name.endswith("_token")))


def with_aliases(variables: Mapping[str, Any], switches: tuple[str, ...]) -> dict[str, Any]:
    """Returns variables in which a switch has the name that the template reads.

    Clients set `enable_thinking`, which some templates call `thinking`.
    """
    named = dict(variables)
    for names in _SAME:
        given = next((name for name in names if name in variables), None)
        if given is not None:
            named |= {name: variables[given] for name in names if name in switches and name not in named}
    return named


def thinking_variables(switches: tuple[str, ...]) -> dict[str, bool]:
    """Returns values of a template's switches that let it show all reasoning."""
    return {
        name: not any(part in name for part in _HIDES)
        for name in switches
        if any(part in name for part in _SHOWS) and "effort" not in name
    }
