"""Patching: a plan in the place of a model's forward."""
