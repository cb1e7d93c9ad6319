"""Loading of a model, its tokenizer and an engine, with a plan cache or without."""
