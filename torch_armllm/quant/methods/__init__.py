"""Rounding methods: how the integers of a layer are chosen."""
