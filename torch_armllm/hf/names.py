"""Names under which transformers knows this package."""

from __future__ import annotations

METHOD = "armllm"
"""``quant_method`` of a saved configuration."""
TIED = "tied"
"""Stands for a scheme where an embedding shares the head's weights."""
