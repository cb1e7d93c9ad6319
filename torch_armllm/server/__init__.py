"""An OpenAI-compatible server over `AsyncLLM`; needs the extra ``serve``."""
