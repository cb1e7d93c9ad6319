"""Replicas: engines in processes of their own, in the place of one engine."""
