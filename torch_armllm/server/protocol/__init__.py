"""Request schemas: OpenAI's fields and vLLM's extensions."""
