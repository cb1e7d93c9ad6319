"""The ``forward`` of a patched module: one for all kinds of models, and how each computes its calls."""
