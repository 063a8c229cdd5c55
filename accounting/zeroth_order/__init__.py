"""Zeroth order training: noisy loss differences."""
