"""Make a user's own training loop private: secret Poisson batches, gradients clipped by record, noise, and a ledger."""
