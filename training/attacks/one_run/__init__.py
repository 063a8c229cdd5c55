"""Audit a whole run in one training: canaries, what their observer sees, and the bounds."""
