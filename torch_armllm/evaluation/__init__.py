"""Accuracy of quantization: lm-eval's tasks on several variants of a model, compared row by row."""
