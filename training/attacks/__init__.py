"""Attacks on runs and on mechanisms, and the games that turn their scores into lower bounds on epsilon."""
