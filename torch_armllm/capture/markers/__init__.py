"""Marker ops: placeholders of attention, experts and latent attention (MLA) in a captured graph."""
