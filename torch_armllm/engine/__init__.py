"""Memory and scheduling of sequences."""
