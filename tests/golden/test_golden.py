"""Golden values stay as they are, but for changes that record them anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import record

GOLDEN: dict[str, Any] = json.loads(record.FILE.read_text())
ENVIRONMENT = record.environment()


@pytest.mark.parametrize(
    ("part", "value", "depends_on"),
    [
        ("logits", record.logits, ("cpu", "python", "torch", "transformers")),
        ("saved folder", record.saved_folder, ("cpu", "python", "torch", "transformers")),
        ("help", record.help_texts, ("python",)),
        ("public names", record.public_names, ()),
    ],
)
def test_golden(part: str, value: Callable[[], Any], depends_on: tuple[str, ...]) -> None:
    here, there = (
        {name: values[name] for name in depends_on} for values in (ENVIRONMENT, GOLDEN["environment"])
    )
    if here != there:
        pytest.skip(f"recorded for {there}, this is {here}")
    assert value() == GOLDEN[part]
