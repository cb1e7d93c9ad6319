"""GPTQModel's ``dynamic`` settings: modules with other settings than the rest, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch_armllm.checkpoint.formats.settings import mapping

_LAYOUT = frozenset(("bits", "group_size", "sym", "desc_act", "static_groups"))
"""Settings that say how a weight is stored."""
_MAKING = frozenset(
    (
        "damp_percent",
        "damp_auto_increment",
        "mse",
        "act_group_aware",
        "true_sequential",
        "hessian",
        "failsafe",
        "fallback",
        "gptaq",
        "adapter",
        "smooth",
    )
)
"""Settings that say how a weight was made, which its integers show."""
_SKIP, _CHANGE = "-:", "+:"


class Dynamic:
    """Settings of each module; the first pattern that matches the beginning of its name holds."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {name: value for name, value in settings.items() if name != "dynamic"}
        self._rules: list[tuple[str, re.Pattern[str], Mapping[str, Any] | None]] = []
        rules = mapping(settings, "dynamic")
        for name in rules:
            skipped = str(name).startswith(_SKIP)
            pattern = str(name).removeprefix(_SKIP if skipped else _CHANGE)
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"dynamic: {name!r} is no regular expression ({error})") from error
            self._rules.append((str(name), compiled, None if skipped else _checked(rules, name)))

    def __bool__(self) -> bool:
        return bool(self._rules)

    def settings_of(self, module: str) -> dict[str, Any]:
        """Returns the settings of a quantized module.

        Raises:
            ValueError: a pattern says that the module is not quantized.
        """
        for name, pattern, changes in self._rules:
            if pattern.match(module):
                if changes is None:
                    raise ValueError(
                        f"{module} is quantized, and {name!r} of dynamic says that it is not: config.json "
                        "belongs to another checkpoint"
                    )
                return self._settings | dict(changes)
        return self._settings


def _checked(rules: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    changes = mapping(rules, name)
    unknown = sorted(set(changes) - _LAYOUT - _MAKING)
    if unknown:
        raise ValueError(
            f"dynamic: {name!r} sets {', '.join(unknown)}, and {', '.join(sorted(_LAYOUT))} can be read"
        )
    return {key: value for key, value in changes.items() if key in _LAYOUT}
