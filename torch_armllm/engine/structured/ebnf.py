"""Grammars in EBNF, as llama.cpp's GBNF, in Lark's syntax."""

from __future__ import annotations

import re
from typing import Any

from torch_armllm.engine.structured.endless_rules import check_ends
from torch_armllm.engine.structured.limits import check_size


def ebnf_to_lark(grammar: str) -> str:
    """Returns a grammar in Lark's syntax, read by llguidance's converter.

    Raises:
        ValueError: it is no EBNF, no text matches one of its rules, or it is too large once it is converted.
    """
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    try:
        rules = GrammarParser().parse(_UNICODE.sub(_character, grammar))
        names = _rename(rules)
        resolve(rules)
        given = {rule.name: names[number] for number, rule in enumerate(_in_order(rules))}
        lark = "".join(f"{rule.name}: {_plain(rule.alternatives).top_str()}\n" for rule in _in_order(rules))
    except Exception as fault:  # of its own, and those of Python for what it did not expect
        raise ValueError(f"structured outputs: the grammar is no EBNF: {fault}") from fault
    check_ends(lark, given)
    check_size("grammar", lark)
    return lark


def _rename(rules: dict[str, Any]) -> list[str]:
    """Numbers all rules but the root, in place; returns their names before.

    The converter changes names to others that Lark knows, which may be those of other rules.
    """
    if "root" not in rules:
        raise ValueError("No 'root' rule found")
    names = list(rules)
    numbered = {name: name if name == "root" else f"rule-{number}" for number, name in enumerate(names)}
    for rule in list(rules.values()):
        for node in _descendants(rule):
            if hasattr(node, "target"):  # a reference
                if node.name not in numbered:
                    raise ValueError(f"Rule '{node.name}' not found")
                node.name = numbered[node.name]
        del rules[rule.name]
        rule.name = numbered[rule.name]
        rules[rule.name] = rule
    return names


def _in_order(rules: dict[str, Any]) -> list[Any]:
    return sorted(rules.values(), key=lambda rule: rule.order)


def _descendants(node: Any) -> list[Any]:
    found = [node]
    for each in found:
        found += each.children()
    return found


def _plain(node: Any) -> Any:
    """Returns a node with what Lark reads in another way replaced: ``x?*``, ``x{0}`` and line ends."""
    from llguidance.gbnf_to_lark import AlternativeNode, LiteralNode, RegexNode, RepetitionNode, SequenceNode

    if isinstance(node, RepetitionNode):
        if node.max_times == 0:
            return LiteralNode("")
        node.node = _plain(node.node)
        if isinstance(node.node, RepetitionNode):
            node.node = AlternativeNode([node.node])  # in parentheses
    elif isinstance(node, AlternativeNode):
        node.alternatives = [_plain(each) for each in node.alternatives]
    elif isinstance(node, SequenceNode):
        node.nodes = [_plain(each) for each in node.nodes]
    elif isinstance(node, LiteralNode):
        node.value = _escaped(node.value)
    elif isinstance(node, RegexNode):
        node.rx = _escaped(node.rx)
    return node


def _escaped(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


_UNICODE = re.compile(r"\\\\|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def _character(escape: re.Match[str]) -> str:
    """Returns the character of an escape, which llguidance's converter would shorten to an invalid one."""
    digits = escape[1] or escape[2]
    if digits is None or 0xD800 <= (code := int(digits, 16)) < 0xE000 or code > 0x10FFFF:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
