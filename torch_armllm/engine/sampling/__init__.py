"""Sampling: from logits to the next tokens."""
