"""The prefix cache on disk: files of blocks and states, found by their tokens in a later process."""
