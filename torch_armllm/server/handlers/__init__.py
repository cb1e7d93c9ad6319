"""Request handlers: the work that the routes delegate."""
