"""The reason why a plan does not compute a call."""


class Unserved(Exception):
    """The plan cannot serve this call; the message states the reason."""
