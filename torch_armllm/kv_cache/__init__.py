"""Paged KV cache: block shapes, block allocation, prefix cache, memory budget."""
