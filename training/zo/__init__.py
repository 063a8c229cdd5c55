"""Zeroth-order training: forward passes on both sides of random directions, and one noised scalar for each."""
