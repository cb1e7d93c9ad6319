"""Audio to text."""
