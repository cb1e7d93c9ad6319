"""Packed modules that take the place of a model's layers."""
