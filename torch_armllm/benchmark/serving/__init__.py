"""Latency and throughput benchmark of any server with an OpenAI-compatible API."""
