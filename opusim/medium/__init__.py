"""The scattering medium: its transmission matrix, and directions taken from it."""

OUTPUTS_PER_BLOCK = 8
"""Entries of a column that one block of the generator makes."""
