"""A protection from another package: whole records at a fixed noise."""
