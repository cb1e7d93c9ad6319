"""Settings of an engine: their types, checks, and what follows from them."""
