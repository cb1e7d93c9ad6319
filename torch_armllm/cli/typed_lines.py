"""Lines that a user types in a terminal, with commands and names of files completed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


class TypedLines:
    """Reads lines from the user.

    Args:
        commands: which Tab completes at the beginning of a line.
        with_files: those of them that the name of a file follows, which Tab completes too.
        help: is shown when the user presses Ctrl-C.
    """

    def __init__(self, commands: Sequence[str], with_files: Sequence[str], help: str) -> None:
        self._commands, self._with_files, self._help = commands, with_files, help
        if sys.stdin.isatty():
            self._complete_on_tab()

    def read(self) -> str | None:
        """Reads a line; returns None at the end of the input."""
        while True:
            try:
                return input("\n> ").strip()
            except KeyboardInterrupt:
                print(f"\n({self._help})")
            except EOFError:
                print()
                return None

    def completions(self, line: str) -> list[str]:
        """Returns what a line may become."""
        command, space, typed = line.partition(" ")
        if not space:
            ends = [f"{each} " if each in self._with_files else each for each in self._commands]
            return [each for each in ends if line and each.startswith(line)]
        if command not in self._with_files:
            return []
        folder, slash, beginning = typed.lstrip().rpartition("/")
        try:
            found = sorted(Path(os.path.expanduser(f"{folder}{slash}")).iterdir())
        except OSError:
            return []
        shown = [path for path in found if path.name.startswith(beginning)]
        if not beginning:
            shown = [path for path in shown if not path.name.startswith(".")]
        kept = line[: len(line) - len(beginning)]
        return [f"{kept}{path.name}{'/' if path.is_dir() else ''}" for path in shown]

    def _complete_on_tab(self) -> None:
        import readline  # also gives input() a history and keys that edit

        def complete(word: str, number: int) -> str | None:
            line = readline.get_line_buffer()[: readline.get_endidx()]
            found = self.completions(line)
            return found[number][len(line) - len(word) :] if number < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        by_libedit = "libedit" in (readline.__doc__ or "")  # macOS
        readline.parse_and_bind("bind ^I rl_complete" if by_libedit else "tab: complete")
