"""What clients send: OpenAI's fields, and vLLM's beside them."""
