"""Reasoning that models write before their answers: its tags, and its parser."""
