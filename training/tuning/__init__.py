"""Choosing a run's settings privately: the best of a random number of random trials."""
