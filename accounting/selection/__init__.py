"""Private selection among trained models."""
