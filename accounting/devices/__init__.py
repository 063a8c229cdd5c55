"""Guarantees from a device's own noise."""
