"""Optical random features, |R x|^2 of binary codes: encoders, maps for scikit-learn and torch, and their kernel."""
