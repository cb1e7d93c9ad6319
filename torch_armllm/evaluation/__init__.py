"""What quantization costs in accuracy: lm-eval's tasks on a model in several schemes, row by row."""
