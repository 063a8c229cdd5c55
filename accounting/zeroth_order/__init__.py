"""Zeroth-order training: a noised scalar for each direction, and what it guarantees."""
