"""Parts of an engine, as its settings and its model ask for them."""
