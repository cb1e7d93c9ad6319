"""ASGI middleware: authentication, limits, connections."""
