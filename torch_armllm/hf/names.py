"""Names of this package in transformers' configurations."""

from __future__ import annotations

METHOD = "armllm"
"""The ``quant_method`` of a saved configuration."""
FORMAT = 1
"""The version of a saved configuration, and of the packed weights that it describes."""
TIED = "tied"
"""Replaces the scheme of an embedding that shares the head's weights."""
WIDE = "float32"
"""Replaces the scheme of a norm whose weight is float32 in a model of 16-bit floats."""
