"""Execution of a step: inputs, runners, LM head, threads."""
