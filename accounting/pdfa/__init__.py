"""Photonic direct feedback alignment: what its paper claims, and why whole records have no guarantee."""
