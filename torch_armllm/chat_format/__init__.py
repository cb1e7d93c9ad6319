"""Chat formats: how a chat template takes conversations and how its model writes, found by rendering it."""
