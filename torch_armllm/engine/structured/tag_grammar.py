"""Structural tags as grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torch_armllm.engine.structured.ebnf import ebnf_to_lark
from torch_armllm.engine.structured.guidance_options import UNFORCED, check_options
from torch_armllm.engine.structured.limits import is_gbnf
from torch_armllm.engine.structured.tag_formats import (
    AnyText,
    Chain,
    Either,
    Format,
    Grammar,
    Regex,
    Repeat,
    Schema,
    Separated,
    Several,
    Tag,
    Text,
    Token,
    Triggered,
)

Ends = tuple[str, ...] | None
"""Texts after a format, one of which follows it and belongs to its expression; None: the output ends there;
empty: something follows that is no fixed text."""


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens by their texts."""
    return {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def literals(text: str, special: Mapping[str, int]) -> list[str]:
    """Returns a text as literals and special tokens of Lark's syntax.

    Args:
        text: of one character or more.
        special: ids of the special tokens, by their texts.
    """
    return _TagGrammar(special).pieces(text)


def user_grammar(grammar: str) -> str:
    """Returns a user's grammar in Lark's syntax.

    Raises:
        ValueError: it is in EBNF, and has a fault.
    """
    return (ebnf_to_lark(grammar) if is_gbnf(grammar) else grammar) + UNFORCED


def tag_grammar(tag: Format, special: Mapping[str, int]) -> str:
    """Returns the grammar of a structural tag in llguidance's format.

    Args:
        tag: the format.
        special: ids of the special tokens, by their texts.

    Raises:
        ValueError: a text is followed by something that does not tell where it ends, a token is no special
            one, or a part has a fault of its own.
    """
    return _TagGrammar(special).text(tag)


class _TagGrammar:
    """Rules of a structural tag.

    Text up to a trigger or an end is lazy: it ends where one of them appears first.  Texts and regular
    expressions next to each other are one terminal, of which llguidance tries all ways to match.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._names = {index: text for text, index in special.items()}
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []
        self._free_texts: dict[AnyText, str] = {}
        self._unforced = False

    def text(self, tag: Format) -> str:
        """Returns the whole grammar."""
        start = self._of(tag, None)
        first = "\n".join([f"start: {start}", *self._rules]) + (UNFORCED if self._unforced else "\n")
        return json.dumps({"grammars": [{"lark_grammar": first}, *self._grammars]})

    def _rule(self, body: str, kind: str = "part", option: str = "") -> str:
        """Adds a rule, or a terminal if the kind is upper-case, and returns its name."""
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name

    def pieces(self, text: str) -> list[str]:
        """Returns a text as literals and special tokens."""
        pieces, begin = [], 0
        for found in self._split.finditer(text):
            if found.start() > begin:
                pieces.append(json.dumps(text[begin : found.start()]))
            pieces.append(f"<[{self._special[found[0]]}]>")
            begin = found.end()
        return [*pieces, json.dumps(text[begin:])] if begin < len(text) else pieces

    def _literal(self, text: str) -> str:
        return " ".join(self.pieces(text)) or '""'

    def _close(self, ends: Ends) -> str:
        return f" ({' | '.join(map(self._literal, ends))})" if ends and any(ends) else ""

    def _of(self, part: Format, ends: Ends) -> str:
        """Returns the expression of a format and of what follows it."""
        if isinstance(part, Token):
            return self._of(Text(self._token_text(part)), ends)
        if self._is_regular(part):
            if ends or _is_open(part):
                return self._up_to(part, ends)
            return self._rule(self._terminal(part), "TEXT")
        if isinstance(part, Chain):
            return self._chain(list(part.elements), ends)
        if isinstance(part, Either):
            return f"({' | '.join(self._of(each, ends) for each in part.elements)})"
        if isinstance(part, Tag):
            return self._tag(part, self._border(part.begin), ends)
        if isinstance(part, Triggered):
            return self._triggered(part, ends)
        if isinstance(part, Separated):
            return self._separated(part) + self._close(ends)
        if isinstance(part, Repeat):
            return self._repeat(part, ends)
        return self._leaf(part) + self._close(ends)

    def _leaf(self, part: Format) -> str:
        if isinstance(part, Text):
            return self._literal(part.value)
        if isinstance(part, Grammar):
            name = f"grammar_{len(self._grammars)}"
            self._unforced = True
            self._grammars.append({"name": name, "lark_grammar": user_grammar(part.grammar)})
            return f"@{name}"
        assert isinstance(part, Schema)
        check_options(part.schema)
        return self._rule(f"%json {json.dumps(part.schema)}")

    def _token_text(self, token: Token) -> str:
        known = self._special if isinstance(token.token, str) else self._names
        if token.token not in known:
            raise ValueError(
                f"structured outputs: the structural tag's token {token.token!r} is no special token of the "
                "tokenizer"
            )
        return token.token if isinstance(token.token, str) else self._names[token.token]

    def _border(self, border: Text | Token) -> str:
        return border.value if isinstance(border, Text) else self._token_text(border)

    # terminals

    def _is_regular(self, part: Format) -> bool:
        """True for what one terminal can match."""
        if isinstance(part, Text):
            return self._split.search(part.value) is None
        return isinstance(part, (Regex, AnyText)) or (
            isinstance(part, (Several, Repeat)) and all(map(self._is_regular, part.parts()))
        )

    def _terminal(self, part: Format) -> str:
        """Returns the expression of a terminal."""
        if isinstance(part, Text):
            return json.dumps(part.value)
        if isinstance(part, Regex):
            from llguidance import regex_to_lark

            self._unforced = True
            return f"/(?:{regex_to_lark(part.pattern, '')})/"
        if isinstance(part, AnyText):
            return self._free_text(part)
        if isinstance(part, Several):
            sign = " | " if isinstance(part, Either) else " "
            return f"({sign.join(map(self._terminal, part.elements))})"
        assert isinstance(part, Repeat)
        return _repeated(self._terminal(part.content), part)

    def _free_text(self, part: AnyText) -> str:
        if part not in self._free_texts:
            body = "/(?s:.*)/" if part.max_chars is None else f"/(?s:.{{0,{part.max_chars}}})/"
            for text in part.excludes:
                body += f" & ~(ANYTHING {json.dumps(text)} ANYTHING)"
            if part.excludes and "ANYTHING: /(?s:.*)/" not in self._rules:
                self._rules.append("ANYTHING: /(?s:.*)/")
            self._free_texts[part] = self._rule(body, "FREE")
        return self._free_texts[part]

    def _up_to(self, part: Format, ends: Ends) -> str:
        """Returns the expression of free text, and of the end at which it ends."""
        if ends is None:
            return self._rule(self._terminal(part), "TEXT")
        if not ends or not all(ends):
            raise ValueError(
                "structured outputs: free text of the structural tag does not tell where it ends: let a text "
                "or a tag with a beginning follow it, or the end of a tag, or nothing"
            )
        text = self._terminal(part)
        return f"({' | '.join(self._lazily(text, self.pieces(end)) for end in ends)})"

    def _lazily(self, text: str, pieces: list[str]) -> str:
        """Returns the expression of a terminal's text up to an end, which may hold special tokens."""
        first, rest = pieces[0], pieces[1:]
        if first.startswith("<"):
            head = self._rule(text, "TEXT")  # a special token ends every text
            return " ".join([head, *pieces])
        if rest:
            return " ".join([self._rule(f"{text} {first}", "TEXT"), *rest])
        return self._rule(f"{text} {first}", option="[lazy]")

    # formats of formats

    def _chain(self, elements: list[Format], ends: Ends) -> str:
        """Returns the expression of formats after each other."""
        left = self._joined(elements)
        written = []
        while left:
            part = left.pop(0)
            if not left:
                written.append(self._of(part, ends))
            elif not (_is_open(part) or self._is_regular(part)):
                written.append(self._of(part, ()))
            else:
                following, rest = self._beginning(left[0])
                written.append(self._of(part, (following,) if following else ()))
                left[:1] = rest
        return " ".join(written) or '""'

    def _joined(self, elements: list[Format]) -> list[Format]:
        """Returns elements with those of one terminal joined."""
        joined: list[Format] = []
        for each in elements:
            if joined and self._is_regular(each) and self._is_regular(joined[-1]):
                last = joined[-1]
                joined[-1] = Chain((*last.elements, each) if isinstance(last, Chain) else (last, each))
            else:
                joined.append(each)
        return joined

    def _beginning(self, part: Format) -> tuple[str, list[Format]]:
        """Returns the fixed text with which a format begins, and the rest of it."""
        if isinstance(part, Token):
            return self._token_text(part), []
        if isinstance(part, Text):
            return part.value, []
        if isinstance(part, Tag):
            return self._border(part.begin), [Tag(Text(""), part.content, part.ends)]
        if isinstance(part, Chain):
            text, rest = self._beginning(part.elements[0])
            return text, [*rest, *part.elements[1:]]
        return "", [part]

    def _tag(self, tag: Tag, begin: str, ends: Ends) -> str:
        """Returns the expression of a tag, whose beginning may be a part of its own."""
        own = tuple(map(self._border, tag.ends))
        before = f"{self._literal(begin)} " if begin else ""
        if own == ("",):
            return before + self._of(tag.content, ends)
        return before + self._of(tag.content, own) + self._close(ends)

    def _triggered(self, part: Triggered, ends: Ends) -> str:
        tags = ""
        if part.at_least_one:
            tags = f"({' | '.join(self._of(tag, ()) for tag in part.tags)})"
            if part.stop_after_first:
                return tags + self._close(ends)
        free = AnyText(part.excludes)
        for end in ends or ():
            for trigger in part.triggers:
                if trigger in end:
                    raise ValueError(
                        f"structured outputs: the end {end!r} of the structural tag holds the trigger "
                        f"{trigger!r}, so that a tag would begin there"
                    )
        pieces = []
        for trigger in part.triggers:
            begun = [
                self._tag(tag, begin[len(trigger) :], ())
                for tag in part.tags
                if (begin := self._border(tag.begin)).startswith(trigger)
            ]
            if begun:
                head = self._lazily(self._free_text(free), self.pieces(trigger))
                pieces.append(f"{head} ({' | '.join(begun)})")
        piece, rest = f"({' | '.join(pieces)})", self._up_to(free, ends)
        if part.stop_after_first:
            return f"({piece}{self._close(ends)} | {rest})"
        return f"{tags} {piece}* {rest}"

    def _separated(self, part: Separated) -> str:
        tags = self._rule(f"({' | '.join(self._of(tag, ()) for tag in part.tags)})")
        more = "" if part.stop_after_first else f" ({self._literal(part.separator)} {tags})*"
        return f"({tags}{more})" + ("" if part.at_least_one else "?")

    def _repeat(self, part: Repeat, ends: Ends) -> str:
        if not _is_open(part.content):
            return _repeated(self._rule(self._of(part.content, ())), part) + self._close(ends)
        if (part.least, part.most) != (0, 1):
            raise ValueError(
                "structured outputs: the structural tag repeats free text, which does not tell where it "
                "ends; give it once"
            )
        return f"({self._of(part.content, ends)} | {self._close(ends) or self._literal('')})"


def _repeated(expression: str, part: Repeat) -> str:
    if part.most == 0:
        return '""'
    return f"({expression}){{{part.least},{'' if part.most is None else part.most}}}"


def _is_open(part: Format) -> bool:
    """True if free text may be last in a format, so that it does not tell where it ends."""
    if isinstance(part, AnyText):
        return True
    if isinstance(part, Triggered):
        return not (part.stop_after_first and part.at_least_one)
    if isinstance(part, Tag):
        return part.ends == (Text(""),) and _is_open(part.content)
    if isinstance(part, Chain):
        return _is_open(part.elements[-1])
    return isinstance(part, (Either, Repeat)) and any(map(_is_open, part.parts()))
