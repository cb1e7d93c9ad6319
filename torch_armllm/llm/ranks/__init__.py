"""Processes that share a model out: as ranks, as stages of a pipeline, or as both."""
