"""The scattering medium: its transmission matrix, and directions taken from it."""
