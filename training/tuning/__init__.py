"""Private search for a run's settings: the best of a Poisson number of trials, with the epsilon of the whole search."""
