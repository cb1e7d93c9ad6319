"""Capture of a transformers model as one ATen graph on packed tokens."""
