"""Trial of a finished model: what users call, by its plan and by its modules."""
