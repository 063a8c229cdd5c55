"""How a run protects its records or labels, and what may be stated about it."""
