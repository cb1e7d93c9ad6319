"""Scheduler: which sequences run in a step, with which blocks."""
