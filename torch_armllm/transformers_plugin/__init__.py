"""Plug-in through which transformers loads and saves quantized models."""
