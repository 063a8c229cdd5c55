"""The scattering medium: its transmission matrix, and directions drawn from it."""
