"""Zeroth order training."""
