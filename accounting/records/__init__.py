"""Mechanisms that protect whole records."""
