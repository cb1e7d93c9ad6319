"""What a chat template reads and writes, found by rendering it."""
