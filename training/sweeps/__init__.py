"""Which runs make a curve? Tables of runs over configuration keys, run in parallel, drawn and reported."""
