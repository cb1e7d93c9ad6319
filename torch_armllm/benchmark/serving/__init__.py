"""Measuring any server that speaks OpenAI's API: how long its clients wait, and how many it serves."""
