"""Patching: replaces a model's forward by a plan."""
