"""The scattering medium: its transmission matrix, and directions taken from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

OUTPUTS_PER_BLOCK = 8
"""Entries of a column that one block of the generator makes."""
