"""Measurements that ship with the package."""
