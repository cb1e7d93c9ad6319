"""Weight formats: how a float matrix becomes small integers."""
