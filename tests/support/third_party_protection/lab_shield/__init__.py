"""A protection from another package: whole records, more strongly clipped."""
