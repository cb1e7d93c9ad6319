"""Tool calling: parsing model outputs into calls, and constraining outputs to calls."""
