"""Convex training, of which only the last iterate is released."""
