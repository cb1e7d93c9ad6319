"""An OpenAI-compatible server on `AsyncLLM`; requires the extra ``serve``."""
