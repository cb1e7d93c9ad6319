"""Infilling: code between a prefix and a suffix, by models with tokens for it."""
