"""Names of this package in transformers' configurations."""

from __future__ import annotations

METHOD = "armllm"
"""The ``quant_method`` of a saved configuration."""
TIED = "tied"
"""Replaces the scheme of an embedding that shares the head's weights."""
