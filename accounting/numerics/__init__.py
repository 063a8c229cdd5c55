"""Numerical bounds that statements rest on, with their rounding."""
