"""Processes that compute shards of a model: as ranks, as stages of a pipeline, or as both."""
