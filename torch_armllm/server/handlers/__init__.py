"""Request handlers behind the routes."""
