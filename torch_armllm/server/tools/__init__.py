"""Calls of tools in answers: how models write them, and how clients get them."""
