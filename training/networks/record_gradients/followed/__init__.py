"""Follow the records of a batch through every operator of a pass; see `tracking`."""
