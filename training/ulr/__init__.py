"""Unified likelihood ratio training: gradients from forward passes with noise on one module's output at a time."""
