"""Helpers of the passes: graph tools, pattern matching, probing."""
