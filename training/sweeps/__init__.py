"""Sweeps: tables of runs over configuration keys, run in parallel, drawn and reported."""
