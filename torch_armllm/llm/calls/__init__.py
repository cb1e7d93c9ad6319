"""Calls of `LLM` and `AsyncLLM`: their arguments, prompts and conversations."""
