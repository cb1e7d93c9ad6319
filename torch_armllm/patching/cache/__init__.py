"""Caches of transformers' interface, over the blocks that plans read."""
