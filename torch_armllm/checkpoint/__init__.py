"""Checkpoints: loading, quantization from folder to folder, third-party formats."""
