"""Survey of transformers' causal language models: which ones are captured, as tiny random models."""
