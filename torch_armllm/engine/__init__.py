"""The inference engine: scheduling, execution, sampling and output of requests."""
