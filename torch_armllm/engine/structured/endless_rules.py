"""Rules of a Lark grammar that no finite text matches, such as ``b: "a" b``.

llguidance refuses some of them.  With a terminal that matches the empty text, as in ``b: /x*/ b``, it repeats
the rule without reading anything, until no memory is left.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_DEFINITION = re.compile(
    r"""
    ^[ \t]*(?:
        [?!]* (?P<name>[A-Za-z_]\w*) (?:\.-?\d+)? (?:\[[^\]\n]*\])? (?:\{[^}\n]*\})? \s*:
        | %(?!json|regex|lark)
    )
    """,
    re.MULTILINE | re.VERBOSE,
)
# Each alternative matches in linear time, so an unterminated literal ends with its line.
_TOKEN = re.compile(
    r"""
    (?P<literal> "(?:\\.|[^"\\\n])*"?i? | /(?![/*])(?:\\.|[^/\\\n])*/?[a-z]* )
    | //[^\n]* | ->\s*\w+ | %\w+
    | (?P<times> ~\s*(?P<least>\d+)(?:\s*\.\.\s*\d+)? | \{(?P<counts>[^{}]*)\} )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<sign> [()\[\]|?*+] )
    """,
    re.VERBOSE,
)


def check_ends(grammar: str, names: Mapping[str, str] | None = None) -> None:
    """Raises ValueError if no text matches a rule of a Lark grammar.

    Args:
        grammar: the text.
        names: of rules in the text that it was converted from; the others have the same name in both.
    """
    if endless := endless_rules(grammar):
        name = (names or {}).get(endless[0], endless[0])
        raise ValueError(
            f"structured outputs: no text matches the rule {name[:100]!r}: all its alternatives refer to "
            "themselves without an end; add one that does not"
        )


def endless_rules(grammar: str) -> list[str]:
    """Returns the names of the rules that no finite text matches, sorted.

    Args:
        grammar: the text of a Lark grammar.  Syntax errors are not reported; unknown names count as defined.
    """
    clauses = _Clauses()
    definitions = list(_DEFINITION.finditer(grammar))
    ends = [*(found.start() for found in definitions[1:]), len(grammar)]
    for found, end in zip(definitions, ends, strict=False):
        if found["name"] is not None:
            clauses.add_rule(found["name"], grammar[found.end() : end])
    return clauses.endless()


class _Clauses:
    """A grammar as clauses: a symbol ends if all symbols of one of its clauses do."""

    def __init__(self) -> None:
        self._rules: set[str] = set()
        self._clauses: list[tuple[str, set[str]]] = []
        self._groups = 0

    def add_rule(self, name: str, body: str) -> None:
        """Adds the clauses of a rule, and those of each group in it."""
        self._rules.add(name)
        suspended: list[tuple[str, list[str]]] = []
        head, symbols = name, [""]  # the alternative that is read; the empty symbol always ends
        for token in _TOKEN.finditer(body):
            sign = token["sign"] or ""
            if token["literal"] is not None:
                symbols.append("")
            elif token["name"] is not None:
                symbols.append(token["name"])
            elif sign == "*" or sign == "?" or (token["times"] is not None and _may_be_left_out(token)):
                symbols[-1] = ""
            elif sign == "|":
                self._clauses.append((head, set(symbols)))
                symbols = [""]
            elif sign == "(" or sign == "[":
                self._groups += 1
                group = f"({self._groups}"
                symbols.append(group if sign == "(" else "")
                suspended.append((head, symbols))
                head, symbols = group, [""]
            elif (sign == ")" or sign == "]") and suspended:
                self._clauses.append((head, set(symbols)))
                head, symbols = suspended.pop()
        self._clauses.append((head, set(symbols)))

    def endless(self) -> list[str]:
        """Returns the rules that do not end; the time is linear in the clauses."""
        heads = {head for head, _ in self._clauses}
        open_symbols = [symbols & heads for _, symbols in self._clauses]
        users: defaultdict[str, list[int]] = defaultdict(list)
        for number, symbols in enumerate(open_symbols):
            for symbol in symbols:
                users[symbol].append(number)
        ending = {head for (head, _), symbols in zip(self._clauses, open_symbols, strict=True) if not symbols}
        waiting = list(ending)
        while waiting:
            symbol = waiting.pop()
            for number in users[symbol]:
                open_symbols[number].discard(symbol)
                head = self._clauses[number][0]
                if not open_symbols[number] and head not in ending:
                    ending.add(head)
                    waiting.append(head)
        return sorted(self._rules - ending)


def _may_be_left_out(token: re.Match[str]) -> bool:
    """True for ``~0..3`` and ``{0,3}``, and for the braces of a ``%json``."""
    least: str = token["least"] if token["counts"] is None else token["counts"].partition(",")[0]
    return not least.strip().strip("0")
