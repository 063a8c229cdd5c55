"""Mechanisms that protect labels."""
