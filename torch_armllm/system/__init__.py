"""The operating system: files, memory, CPUs, signals, locks of the process."""
