"""Convex training that releases only the last iterate."""
