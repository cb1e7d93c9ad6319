"""The seams into transformers."""
