"""`LLM`, `AsyncLLM` and loading of engines."""
