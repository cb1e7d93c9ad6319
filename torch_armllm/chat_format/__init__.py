"""Chat formats: how a model writes reasoning and tool calls, derived from its chat template."""
