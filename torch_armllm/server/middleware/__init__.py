"""ASGI middleware: API keys, limits, connections."""
