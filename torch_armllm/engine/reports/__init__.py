"""Reports of an engine and its machine: statistics, metrics, traces and diagnostics."""
