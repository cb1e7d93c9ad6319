"""Structured outputs: grammars, JSON schemas and structural tags, and the tokens that they allow."""
