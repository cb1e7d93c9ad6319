"""Numbers of adapters in their slots."""

from __future__ import annotations

from typing import Literal

LoraDtype = Literal["auto", "int8", "model"]
"""Values of the setting ``lora_dtype``: ``int8`` has a scale for each 64 numbers, ``model`` is the model's
dtype, and ``auto`` is ``int8`` unless the model's dtype is float32."""
