"""Text: chat templates, detokenization, stop strings."""
