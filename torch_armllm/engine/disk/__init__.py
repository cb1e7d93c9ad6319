"""The prefix cache on disk in an engine: which model its files are of, and requests that wait for them."""
