"""Checkpoints: loading, quantizing from folder to folder, other tools' formats."""
