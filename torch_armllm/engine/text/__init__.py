"""Text processing: chat templates, detokenization and stop strings."""
