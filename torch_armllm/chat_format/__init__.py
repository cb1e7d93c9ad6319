"""Chat formats: the forms in which a chat template takes and writes, found by rendering it."""
