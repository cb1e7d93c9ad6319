"""Every causal language model of transformers, tiny: what is captured, what is not, and why."""
