"""``generate`` of a patched model: transformers prepares a call, plan steps compute the tokens."""
