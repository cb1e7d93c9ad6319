"""User-facing classes `LLM`, `AsyncLLM` and `ChatSession`, and the loading of engines."""
