"""Marker ops that stand for attention, experts and MLA in a captured graph."""
