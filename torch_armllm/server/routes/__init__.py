"""The routes, a file a group."""
